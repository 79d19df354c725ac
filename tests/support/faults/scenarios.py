"""The calls that faults.py lets fail: of publishers, subscribers, both ends of schemes, and the commands."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re

import torch

import shmsync
from shmsync import cli
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.faults.faults import Scenario, need
from support.jobs import engine
from support.processes import segment_path
from support.weights import Net, stamped, stamps
from support.worker import nothing

NAME = f"fault-{os.getpid()}"
SHORT = 0.12  # seconds: longer than two slices of waiting, each of which looks at the partner


# ---- the publisher


class Create(Scenario):
    pub = None

    def act(self):
        self.pub = shmsync.Publisher(stamped(1), name=NAME)

    def check(self, error):
        need(error is None or not segment_path(NAME).exists(), "it left a segment")

    def restore(self):
        if self.pub is not None:
            self.pub.close()
        self.pub = None
        need(not segment_path(NAME).exists(), "close() left a segment")


class CreateInThePlaceOfAnother(Scenario):
    """The name is that of a living publisher, which keeps it."""

    expected = shmsync.ArenaExists

    def __init__(self, start):
        self.trainer = start()
        self.handle = self.trainer.call(engine.open_arena, 3, name=NAME)

    def act(self):
        shmsync.Publisher(stamped(1), name=NAME).close()

    def check(self, error):
        need(segment_path(NAME).exists(), "a living arena lost its name")
        with shmsync.Subscriber(self.handle) as sub:
            need(engine.read(sub) == (3, 3, 3), "the living arena changed")

    def end(self):
        self.trainer.call(engine.close_publisher)


class ClosePublisher(Create):
    def prepare(self):
        self.pub = shmsync.Publisher(stamped(1), name=NAME)

    def act(self):
        if self.pub is not None:
            self.pub.close()

    def check(self, error):
        need(error is not None or not segment_path(NAME).exists(), "close() left the name")


class WithReader(Scenario):
    """A publisher here and a reader in another process."""

    slots = 1

    def __init__(self, start):
        self.pub = shmsync.Publisher(stamped(1), slots=self.slots, timeout=5)
        self.reader = start()
        self.reader.call(engine.attach, self.pub.handle, worker=5)
        self.version = 1

    def check(self, error):
        rows = [(row.worker, row.state.value) for row in self.pub.readers()]
        need(rows == [(5, "live")], f"the reader's row became {rows}")
        if self.pub.version != self.version:
            need(error is None or isinstance(error, shmsync.AckTimeout), f"{error!r}, but published")
            self.version = self.pub.version

    def end(self):
        self.reader.call(engine.detach)
        self.pub.close()


class Publish(WithReader):
    def act(self):
        self.pub.publish(stamped(self.version + 1))

    def check(self, error):
        super().check(error)
        need(self.reader.call(engine.look) == (self.version,) * 3, "the reader sees something else")


class PublishInSlots(Publish):
    slots = 2


class Update(Publish):
    def act(self):
        with self.pub.update() as weights:
            for leaf in weights.values(True, True):
                leaf.fill_(self.version + 1)


class PublishPastAPin(WithReader):
    """The reader is in a section, and lives: it cannot be published."""

    expected = shmsync.ReaderStalled

    def prepare(self):
        self.reader.call(engine.enter)

    def act(self):
        self.pub.publish(stamped(self.version + 1), timeout=SHORT)

    def check(self, error):
        super().check(error)
        need(self.pub.version == 1, "published over a living pin")

    def restore(self):
        need(self.reader.call(engine.leave) is False, "the section was torn")


class PublishPastAPinInSlots(PublishPastAPin):
    slots = 2

    def __init__(self, start):
        super().__init__(start)
        self.pinned = False

    def prepare(self):
        super().prepare()
        self.version = self.pub.publish(stamped(self.pub.version + 1), timeout=5)
        self.before = self.version

    def check(self, error):
        WithReader.check(self, error)
        need(self.pub.version == self.before, "published over a living pin")


class WaitForALateReader(WithReader):
    expected = shmsync.AckTimeout

    def act(self):
        self.pub.publish(stamped(self.version + 1), wait="all", timeout=SHORT)


class WaitForANamedReader(WaitForALateReader):
    def act(self):
        self.pub.publish(stamped(self.version + 1), wait=[5], timeout=SHORT)


def read_on(state):
    while not state.conn.poll(0.0005):
        state.sub.refresh()
    return state.sub.version


class WaitForReader(WithReader):
    def prepare(self):
        self.reader.start(read_on)

    def act(self):
        self.pub.publish(stamped(self.version + 1), wait="all", timeout=5)

    def restore(self):
        self.reader.interrupt(engine.look)


def enter_and_die(handle):
    sub = shmsync.Subscriber(handle)
    sub.read().__enter__()
    os.kill(os.getpid(), 9)


class PublishPastADeadReader(Scenario):
    def __init__(self, start):
        self.pub = shmsync.Publisher(stamped(1), timeout=5)

    def prepare(self):
        pid = os.fork()
        if pid == 0:
            enter_and_die(self.pub.handle)
        os.waitpid(pid, 0)

    def act(self):
        self.pub.publish(stamped(self.pub.version + 1))

    def check(self, error):
        need(error is None and self.pub.readers() == [], "the dead reader's row stays")

    def end(self):
        self.pub.close()


# ---- the subscriber


class WithTrainer(Scenario):
    """A publisher in another process, and a subscriber here."""

    slots = 1
    consistency = "pinned"

    def __init__(self, start):
        self.trainer = start()
        self.handle = self.trainer.call(engine.open_arena, 1, slots=self.slots)
        self.version = 1
        self.sub = shmsync.Subscriber(self.handle, worker=5, consistency=self.consistency)

    def prepare(self):
        self.version += 1
        self.trainer.call(engine.publish, self.version)

    def check(self, error):
        need(engine.read(self.sub) == (self.version,) * 3, "it sees something else")

    def end(self):
        self.sub.close()
        self.trainer.call(engine.close_publisher)


def workers(state):
    return sorted(reader.worker for reader in state.pub.readers())


class Attach(WithTrainer):
    allowed = (shmsync.NoSpace, shmsync.ArenaNotFound)  # the latter: it may not be opened
    other = None

    def prepare(self):
        pass

    def act(self):
        self.other = shmsync.Subscriber(self.handle, worker=6)

    def check(self, error):
        found = self.trainer.call(workers)
        need(found == ([5] if error else [5, 6]), f"the reader table has {found}")
        need(error is not None or engine.read(self.other) == (1, 1, 1), "it sees something else")

    def restore(self):
        if self.other is not None:
            self.other.close()
        self.other = None
        need(self.trainer.call(workers) == [5], "close() left the row")


class Detach(Attach):
    def prepare(self):
        self.other = shmsync.Subscriber(self.handle, worker=6)

    def act(self):
        self.other.close()

    def check(self, error):
        found = self.trainer.call(workers)
        need(error is not None or found == [5], f"the reader table has {found}")


class AttachToAFullTable(Scenario):
    allowed = (shmsync.NoSpace, shmsync.ArenaNotFound)
    expected = shmsync.ReaderTableFull

    def __init__(self, start):
        self.trainer, self.reader = start(2)
        self.handle = self.trainer.call(engine.open_arena, 1, max_readers=1)
        self.reader.call(engine.attach, self.handle, worker=5)

    def act(self):
        shmsync.Subscriber(self.handle, worker=6).close()

    def check(self, error):
        need(self.trainer.call(workers) == [5], "a living reader lost its row")

    def end(self):
        self.reader.call(engine.detach)
        self.trainer.call(engine.close_publisher)


class Read(WithTrainer):
    def act(self):
        found = engine.read(self.sub)
        need(found == (self.version,) * 3, f"it read {found}")


class ReadInSlots(Read):
    slots = 2


class ReadOptimistically(Read):
    slots = 2
    consistency = "optimistic"


class Refresh(WithTrainer):
    def act(self):
        need(self.sub.refresh() or self.sub.version == self.version, "nothing is new")


class Snapshot(WithTrainer):
    def act(self):
        found = self.sub.snapshot()
        need(stamps(found.weights) == (self.version,) * 2, "the snapshot is of something else")


class ReadWhileTheWriterWrites(WithTrainer):
    """The publisher is inside update(), and lives: nobody may enter."""

    expected = shmsync.WriterBusy

    def __init__(self, start):
        super().__init__(start)
        self.trainer.call(engine.begin_update, 2)

    def prepare(self):
        pass

    def act(self):
        return engine.read(self.sub, timeout=SHORT)

    def check(self, error):
        need(self.sub.version == 1, "it entered")

    def end(self):
        self.sub.close()
        self.trainer.call(end_update)


def end_update(state):
    state.update.__exit__(None, None, None)
    state.update = None
    engine.close_publisher(state)


class WaitForAVersion(WithTrainer):
    expected = shmsync.PublishTimeout

    def act(self):
        self.sub.wait_version(self.version + 1, timeout=SHORT)


def open_net(state):
    state.net = Net(0)
    state.pub = shmsync.Publisher(state.net)
    return state.pub.handle


def shift_net(state):
    with torch.no_grad():
        for parameter in state.net.parameters():
            parameter.add_(0.5)
    state.pub.publish()
    return state.net.eval()(torch.ones(2, 6)).detach().cpu()


class Bind(Scenario):
    def __init__(self, start):
        self.trainer = start()
        self.handle = self.trainer.call(open_net)

    def prepare(self):
        self.sub, self.module = shmsync.Subscriber(self.handle), Net(1).eval()
        self.expected_output = self.trainer.call(shift_net)

    def act(self):
        self.sub.bind(self.module)

    def check(self, error):
        if error is None:
            with torch.no_grad():
                need(torch.equal(self.module(torch.ones(2, 6)), self.expected_output), "it computes something else")

    def restore(self):
        self.sub.close()
        self.sub = self.module = None

    def end(self):
        self.trainer.call(engine.close_publisher)


class CallABoundModule(Bind):
    def prepare(self):
        super().prepare()
        self.sub.bind(self.module)
        self.expected_output = self.trainer.call(shift_net)

    def act(self):
        with torch.no_grad():
            need(torch.equal(self.module(torch.ones(2, 6)), self.expected_output), "it computes something else")


# ---- schemes


def serve_scheme(state, scheme, pipe):
    """Receive until the next call comes."""
    state.model = Net(1)
    scheme.init_on_worker("policy", pipe=pipe, model=state.model)
    receiver = scheme.get_receiver()
    while not state.conn.poll():
        receiver.receive(0.01)
    scheme.shutdown()
    return [parameter.detach().cpu().clone() for parameter in state.model.parameters()]


class Send(Scenario):
    scheme = MultiProcessWeightSyncScheme
    allowed = (shmsync.NoSpace, shmsync.AckTimeout)

    def __init__(self, start):
        self.worker = start()
        self.net = Net(0)

    def prepare(self):
        self.ours, theirs = multiprocessing.Pipe()
        self.worker.begin(serve_scheme, self.scheme(), theirs)
        theirs.close()
        self.sender = None

    def act(self):
        if self.sender is None:
            self.made = self.scheme()
            self.made.init_on_sender("policy", pipes=[self.ours], procs=[self.worker.process], model=self.net)
            self.sender = self.made.get_sender()
        for _ in range(2):
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.add_(0.5)
            self.sender.send(timeout=5)

    def restore(self):
        self.made.shutdown()
        found = self.worker.interrupt(nothing)
        wanted = list(self.net.parameters())
        self.ours.close()
        self.made = self.sender = self.ours = None
        need(all(map(torch.equal, found, wanted)), "the worker has something else")


class SendThroughAnArena(Send):
    scheme = SharedMemWeightSyncScheme


def open_scheme(state, scheme, pipe):
    state.scheme, state.net, state.pipe = scheme, Net(0), pipe
    scheme.init_on_sender("policy", pipes=[pipe], model=state.net)


def send_until_called(state):
    """Send again and again."""
    sender, sent = state.scheme.get_sender(), 0
    while not state.conn.poll():
        with torch.no_grad():
            for parameter in state.net.parameters():
                parameter.add_(0.5)
        # A worker that could not apply it says so, and gets the next version. It lives, so it may not count as dead.
        with contextlib.suppress(shmsync.AckTimeout, shmsync.NoSpace, shmsync.ArenaNotFound):
            sender.send(timeout=0.2)
            sent += 1
    return sent


def shut_scheme(state):
    state.scheme.shutdown()
    state.pipe.close()


class Receive(Scenario):
    scheme = MultiProcessWeightSyncScheme

    def __init__(self, start):
        self.trainer = start()

    def prepare(self):
        self.ours, theirs = multiprocessing.Pipe()
        self.trainer.call(open_scheme, self.scheme(), theirs)
        theirs.close()
        self.trainer.begin(send_until_called)
        self.made, self.receiver, self.model = self.scheme(), None, Net(1)

    def act(self):
        if self.receiver is None:
            self.made.init_on_worker("policy", pipe=self.ours, model=self.model)
            self.receiver = self.made.get_receiver()
        for _ in range(3):
            self.receiver.receive(1.0)

    def check(self, error):
        need(self.receiver is None or not self.ours.closed, "the pipe is closed")
        if error is None:
            before = self.receiver.version
            for _ in range(20):
                if self.receiver.receive(1.0) and self.receiver.version > before:
                    return
            need(False, "nothing arrives any more")

    def restore(self):
        self.trainer.conn.send((shut_scheme, (), {}))
        for _ in range(50):  # the last messages of a sender that shuts down want an answer, too
            if self.trainer.conn.poll(0.01):
                break
            if self.receiver is not None:
                with contextlib.suppress(shmsync.WriterDied):
                    self.receiver.receive(0.01)
        self.trainer.result()
        self.trainer.result()
        self.made.shutdown()
        self.ours.close()
        self.made = self.receiver = self.model = self.ours = None


class ReceiveFromAnArena(Receive):
    scheme = SharedMemWeightSyncScheme


# ---- the commands


class List(Scenario):
    """There are a living arena and a dead one, which any other new publisher of this machine may remove."""

    command: tuple[str, ...] = ("list", "--interval", "0")

    def __init__(self, start):
        self.trainer, self.victim = start(2)
        self.handle = self.trainer.call(engine.open_arena, 3, name=NAME)
        self.leave_one()

    def leave_one(self):
        self.victim.call(engine.open_arena, 1, name=f"{NAME}-dead")
        self.copy = segment_path(f"{NAME}-dead").read_bytes()
        self.victim.kill()

    def prepare(self):
        segment_path(f"{NAME}-dead").write_bytes(self.copy)

    def act(self):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
            status = cli.main(self.command)
        self.said = said.getvalue()
        need(status in (0, 1), f"status {status}")
        if status == 0:
            need(f"{NAME} " in self.said or f"kept {NAME}:" in self.said, f"{NAME} is left out of\n{self.said}")
            dead = f"{NAME}-dead"
            need(dead in self.said or not segment_path(dead).exists(), f"{dead} is left out of\n{self.said}")

    def check(self, error):
        need(segment_path(NAME).exists(), "a living arena lost its name")
        need(not re.search(rf"^{NAME} +dead", self.said, re.M), "a living one is shown as dead")
        with shmsync.Subscriber(self.handle) as sub:
            need(engine.read(sub) == (3, 3, 3), "the living arena changed")

    def restore(self):
        segment_path(f"{NAME}-dead").unlink(missing_ok=True)

    def end(self):
        self.trainer.call(engine.close_publisher)


class Gc(List):
    command = ("gc",)


GROUPS = {
    "publisher": [Create, CreateInThePlaceOfAnother, ClosePublisher, Publish, PublishInSlots, Update],
    "publisher with readers": [
        PublishPastAPin,
        PublishPastAPinInSlots,
        WaitForALateReader,
        WaitForANamedReader,
        WaitForReader,
        PublishPastADeadReader,
    ],
    "subscriber attaches": [Attach, Detach, AttachToAFullTable, Bind],
    "subscriber reads": [
        Read,
        ReadInSlots,
        ReadOptimistically,
        Refresh,
        Snapshot,
        CallABoundModule,
        ReadWhileTheWriterWrites,
        WaitForAVersion,
    ],
    "sender": [Send, SendThroughAnArena],
    "receiver": [Receive, ReceiveFromAnArena],
    "commands": [List, Gc],
}
