"""The two ends of a storm over the engine, each in a separate process."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from pathlib import Path

import torch

import shmsync
from support.devices.simulated import on_host
from support.processes import descriptors
from support.storms.board import COMPUTING, EXIT, IDLE, NOTHING, REFUSED, STOP, Board
from support.storms.fleets import timed
from support.storms.model import FINE, GLANCE, TORN, Weather, element, leaf
from support.storms.worker import look

# What a reader may meet while its publisher is dead, stopped or half way; it goes on.
EXPECTED = (shmsync.ArenaNotFound, shmsync.WriterDied, shmsync.Poisoned, shmsync.WriterBusy, shmsync.ClosedError)
EXPECTED += (OSError,)


GLANCES = 96  # sections that look at a few elements only, for one that looks at all


def use(device):
    if device:
        from shmsync.memory import devices
        from support.devices.simulated import install

        install(devices)


# ---- the trainer


def make_publisher(state, name, slots, number, device):
    use(device)
    state.pub = shmsync.Publisher(Weather(number), name=name, slots=slots, max_readers=32)


def send(state, how, number, wait, timeout):
    """What timed() says of one call of the publisher, who had a row before it, and how many rows it took back."""
    rows, reaped = {row.worker for row in state.pub.readers()}, state.pub.stats().reaped
    found = list(timed(lambda: send_now(state.pub, how, number, wait, timeout), {}))
    if found[-1] is not None:
        found[-1].__traceback__ = found[-1].__context__ = None
    return tuple(found), rows, state.pub.stats().reaped - reaped


def send_now(pub, how, number, wait, timeout):
    try:
        if "in place" in how:
            with pub.update(wait=wait, timeout=timeout) as weights:
                fill(weights, number, 2 if how.startswith("fails") else 4)
                if how.startswith("fails"):
                    raise LookupError("in the middle of an update")
            return pub.version
        weights = Weather(number)
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
            if not reader.go_on():
                break
        except KeyboardInterrupt:  # wherever it lands
            continue
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
        self._newest = {0: 0}
        self._calls = 0
        self._arrays = {}  # of the leaves, by the weights that a section gave

    def go_on(self):
        """Until something has befallen it. False: until the end."""
        try:
            while self.obey(self.row.get("command")):
                self.compute()
                time.sleep(0.003)  # eight of them must leave the machine some time
            return False
        except EXPECTED as error:
            self.row.set("phase", REFUSED if isinstance(error, shmsync.Poisoned) else IDLE)
            time.sleep(0.002)
        return True

    def obey(self, command):
        if command == NOTHING:
            return True
        if command == STOP:
            return False
        if command == EXIT:
            self.close()
            os._exit(0)
        raise AssertionError(command)

    def close(self):
        sub, self._sub, self._model = self._sub, None, None
        if sub is not None:
            sub.close()

    def compute(self):
        if self._sub is None:
            sub = shmsync.Subscriber(
                self._name, worker=self._worker, consistency=self._consistency, follow=True, timeout=0.5
            )
            self._model, self._sub = sub.bind(Weather(0)), sub
        self.row.set("phase", COMPUTING)
        for _ in range(GLANCES):
            self.glance()
        self._arrays.clear()  # they would keep the memory of an earlier trainer
        self._calls += 1
        self.row.set("phase", COMPUTING)
        start = time.monotonic_ns()
        with torch.no_grad():
            if self._calls % 16 == 0:
                number, matter, where = forecast(self._sub.snapshot().weights)
            else:
                number, matter, where = self._model()
        look(self.row, self._newest, 0, (number, matter, where))
        self.row.forward(start, number)
        self.row.set("phase", IDLE)

    def glance(self):
        """A section that looks at one element of each leaf."""
        with self._sub.read() as section:
            weights = section.weights
            arrays = self._arrays.get(id(weights))
            if arrays is None or arrays[0] is not weights:
                leaves = [on_host(weights["leaves", str(index)]).numpy() for index in range(4)]
                arrays = self._arrays[id(weights)] = (weights, on_host(weights["number"]).numpy(), leaves)
            number = int(arrays[1][0])
            seen = [float(array[place]) for array, place in zip(arrays[2], GLANCE, strict=True)]
        if section.torn:  # so it says, when it is optimistic
            return
        odd = [i for i, value in enumerate(seen) if value != element(number, i, GLANCE[i])]
        look(self.row, self._newest, 0, (number, TORN if odd else FINE, odd[0] if odd else 0))


def forecast(weights):
    number = int(weights["number"])
    for index in range(4):
        if not torch.equal(weights["leaves", str(index)], leaf(number, index)):
            return number, TORN, index
    return number, FINE, 0


def used_by(pid):
    """What a process holds; `files`: which descriptors, without their numbers."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["RssAnon"].split()[0]) * 1024
    files = Counter(re.sub("[0-9]+", "N", target) for target in descriptors(pid).values())
    pidfds = files.pop("anon_inode:[pidfd]", 0)
    used = {"descriptors": files.total(), "pidfds": pidfds, "threads": int(status["Threads"]), "memory": memory}
    return {**used, "files": files}


def more_than(first, now):
    """In words, what a process holds more of than at first, beyond what comes and goes; empty: nothing."""
    # A publisher keeps a pidfd for each reader that it has waited for, until that one leaves.
    for what, slack in (("descriptors", 4), ("pidfds", 9), ("threads", 2), ("memory", 96 << 20)):
        if now[what] > first[what] + slack:
            more = f" (more are {dict(now['files'] - first['files'])})" if what == "descriptors" else ""
            return f"{now[what]} {what}{more}, and had {first[what]}"
    return ""
