"""Calls of a subscriber, and of a module that is bound to it."""

from __future__ import annotations

import torch

import shmsync
from support.faults.faults import Scenario, need
from support.jobs import engine
from support.weights import Net, stamps

from .publisher import SHORT


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
    """The publisher is inside update(), and lives: no reader may enter."""

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
