"""The two ends of a storm over the engine, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import torch

import shmsync
from support.storm_board import COMPUTING, EXEC, EXIT, FORK, IDLE, NOTHING, STOP, STRIDE, Board
from support.storm_fleets import timed
from support.storm_model import FINE, TORN, Weather, leaf

# What a reader may meet while its publisher is dead, stopped or half way; it goes on.
EXPECTED = (
    shmsync.ArenaNotFound, shmsync.WriterDied, shmsync.Poisoned, shmsync.WriterBusy, shmsync.NoSpace, shmsync.ClosedError,
    OSError, MemoryError,
)  # fmt: skip


class Wide(Weather):
    """The same model in another layout: so many leaves more, which nobody looks at."""

    def __init__(self, number, more):
        super().__init__(number)
        for each in range(more):
            self.register_buffer(f"more{each}", torch.zeros(8))


def use(device):
    if device:
        from shmsync.memory import devices
        from support.simulated import install

        install(devices)


# ---- the trainer


def make_publisher(state, name, slots, number, more, device):
    use(device)
    state.more = more
    state.pub = shmsync.Publisher(Wide(number, more), name=name, slots=slots, max_readers=32)


def send(state, how, number, wait, timeout, row):
    """(start, end, waited, value, error) of one call of the publisher."""
    del row
    found = list(timed(lambda: send_now(state.pub, how, number, state.more, wait, timeout), {}))
    if found[-1] is not None:
        found[-1].__traceback__ = found[-1].__context__ = None
    return tuple(found)


def send_now(pub, how, number, more, wait, timeout):
    try:
        if "in place" in how:
            with pub.update(wait=wait, timeout=timeout) as weights:
                fill(weights, number, 2 if how.startswith("fails") else 4)
                if how.startswith("fails"):
                    raise LookupError("in the middle of an update")
            return pub.version
        weights = Wide(number, more)
        if how == "mapping":
            weights = dict(weights.state_dict())
        return pub.publish(weights, wait=wait, timeout=timeout)
    except KeyboardInterrupt as error:
        raise InterruptedError("Ctrl-C") from error


def fill(weights, number, leaves):
    for index in range(leaves):
        weights["leaves", str(index)].copy_(leaf(number, index))
    weights["number"].fill_(number)


# ---- a reader


def read_on(state, path, index, name, worker, consistency, device):
    """Compute, and note what was seen, until told to end. Whatever befalls it, it goes on."""
    use(device)
    board = Board(path)
    row = board.row(index)
    row.set("pid", os.getpid())
    reader = ReaderEnd(row, name, worker, consistency)
    while True:
        try:
            if not reader.obey(row.get("command")):
                break
            reader.compute()
        except EXPECTED:
            time.sleep(0.002)
        except shmsync.ManifestMismatch:
            reader.attach_anew()
        except KeyboardInterrupt:
            reader.interrupts += 1
    with contextlib.suppress(*EXPECTED):
        reader.close()
    forwards = row.get("forwards")
    row.close()
    board.close()
    return forwards


class ReaderEnd:
    """A subscriber with a module that is bound to it."""

    def __init__(self, row, name, worker, consistency):
        self.row, self._name, self._worker, self._consistency = row, name, worker, consistency
        self._sub = self._model = None
        self._newest = 0
        self._calls = 0
        self.interrupts = 0

    def obey(self, command):
        if command == NOTHING:
            return True
        self.row.set("command", NOTHING)
        if command == STOP:
            return False
        if command == EXIT:
            self.close()
            os._exit(0)
        if command == EXEC:
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        if command == FORK:
            self.fork()
        if command == STRIDE:
            strike()
        return True

    def attach_anew(self):
        self.close()

    def close(self):
        sub, self._sub, self._model = self._sub, None, None
        if sub is not None:
            sub.close()

    def compute(self):
        if self._sub is None:
            sub = shmsync.Subscriber(
                self._name, worker=self._worker, consistency=self._consistency, follow=True, timeout=0.5
            )
            self._model, self._sub = sub.bind(Weather()), sub
        self._calls += 1
        if self._calls % 64 == 0:
            self._sub.refresh()  # raises when the layout has changed
        self.row.set("phase", COMPUTING)
        start = time.monotonic_ns()
        with torch.no_grad():
            if self._calls % 16 == 0:
                number, matter, where = forecast(self._sub.snapshot().weights)
            else:
                number, _, matter, where = self._model()
        if matter != FINE:
            self.row.set("detail", number * 100 + where)
            self.row.add("torn" if matter == TORN else "wrong")
        if number < self._newest:
            self.row.set("detail", number)
            self.row.add("backwards")
        self._newest = number
        self.row.forward(start, number)
        self.row.set("phase", IDLE)

    def fork(self):
        """A child of this process may not use its subscriber, and takes nothing from it."""
        pid = os.fork()
        if pid == 0:
            try:
                self._sub.read().__enter__()
                os._exit(1)
            except shmsync.ForkedHandle:
                os._exit(0)
            except BaseException:
                os._exit(2)
        _, status = os.waitpid(pid, 0)
        if self._sub is not None and status != 0:
            self.row.set("detail", status)
            self.row.add("wrong")


def forecast(weights):
    number = int(weights["number"])
    for index in range(4):
        if not torch.equal(weights["leaves", str(index)], leaf(number, index)):
            return number, TORN, index
    return number, FINE, 0


def strike():
    """The wall clock of this process is a day off from now on, the other way each time."""
    real, off = getattr(time.time, "real", time.time), -getattr(time.time, "off", -86400)

    def clock():
        return real() + off

    clock.real, clock.off = real, off
    time.time = clock


def hold_descriptors(pid):
    """What a process holds."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["RssAnon"].split()[0]) * 1024
    return {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(status["Threads"]), "memory": memory}
