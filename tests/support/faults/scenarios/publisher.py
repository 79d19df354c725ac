"""Calls of a publisher."""

from __future__ import annotations

import os

import shmsync
from support.faults.faults import Scenario, need
from support.jobs import engine
from support.processes import segment_path
from support.weights import stamped

NAME = f"fault-{os.getpid()}"
SHORT = 0.12  # seconds: longer than two slices of waiting, each of which looks at the partner


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


class WaitForALateReader(WithReader):
    expected = shmsync.AckTimeout

    def act(self):
        self.pub.publish(stamped(self.version + 1), wait="all", timeout=SHORT)


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
