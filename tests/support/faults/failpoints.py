"""A process that is killed, stopped or paused between two steps of the protocol, and a test that sees it there.

    with Held(worker, "commit.current", "kill") as held:
        held.run(publish, 2)         # returns when the worker has come to that point, and is dead there

Points of the native core are in its sources: SHMSYNC_FAILPOINT("name"), in builds for these tests only. Steps in Python
get theirs from outside: armed() wraps the functions of AROUND in the process that passes them.
"""

from __future__ import annotations

import functools
import os
import secrets
import select
import signal
import tempfile
from contextlib import ExitStack

from shmsync import _native
from shmsync.memory import leftovers, segment, segment_file, slab
from support import processes
from support.weights import stamp
from support.worker import Gone

ACTIONS = ("kill", "stop", "pause")
SLOTS = (1, 2, 3)
CONSISTENCIES = ("pinned", "optimistic", "live")
CHOICES = {"action": ACTIONS, "slots": SLOTS, "consistency": CONSISTENCIES}
USUAL = [("kill", 1, "pinned"), ("kill", 2, "optimistic"), ("stop", 1, "optimistic"), ("pause", 3, "live")]
# What Python does: (where the function is found, its name, the point before it, the point after it).
AROUND = [
    (slab, "create", None, "slab.created"),
    (segment, "hold_for_life", None, "segment.locked"),
    (segment, "_named", "segment.nameless", "segment.named"),
    (slab, "attach", None, "slab.attached"),
    (segment_file, "unlink", "sweep.locked", "sweep.unlinked"),
    (segment, "withdraw", "withdraw.before", "withdraw.after"),
]


def wrapped(function, before, after):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if before:
            _native.pass_failpoint(before)
        value = function(*args, **kwargs)
        if after:
            _native.pass_failpoint(after)
        return value

    return call


def armed(state, spec, function, *args, **kwargs):
    """In the worker: call it with these points armed."""
    with ExitStack() as after:
        for place, name, *points_of_it in AROUND:
            real = getattr(place, name)
            setattr(place, name, wrapped(real, *points_of_it))
            after.callback(setattr, place, name, real)
        _native.arm_failpoints(spec)
        after.callback(_native.arm_failpoints, "")
        return function(state, *args, **kwargs)


def in_place(state, version):
    """Publish by an update() that writes every leaf."""
    with state.pub.update() as weights:
        stamp(weights, version)
    return state.pub.version


def half_written(state, version):
    """An update() that writes a leaf and fails."""
    with state.pub.update() as weights:
        weights["large"].fill_(version)
        raise KeyError("in the middle")


def sweep(state, name):
    return leftovers.sweep(name)


class NotPassed(AssertionError):
    """The call ended before it came to the point."""


class Held:
    """A worker that will be held at a point; see above. Goes on at the end, unless it was killed."""

    def __init__(self, worker, point, action, nth=1):
        self.worker, self.point, self.action, self._nth = worker, point, action, nth
        self._folder = tempfile.TemporaryDirectory()
        self._fifo = f"{self._folder.name}/{secrets.token_hex(4)}"
        self.held = False

    def __enter__(self):
        os.mkfifo(self._fifo)
        os.mkfifo(self._fifo + ".go")
        self._reached = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK)
        return self

    def __exit__(self, *exc_info):
        try:
            if self.held and self.worker.process.is_alive():
                self.let_go()
        finally:
            os.close(self._reached)
            self._folder.cleanup()

    def run(self, function, *args, **kwargs):
        """Start it, and return when the worker is held."""
        how = f"pause:{self._fifo}" if self.action == "pause" else self.action
        self.worker.start(armed, f"{self.point}={how}@{self._nth}", function, *args, **kwargs)
        processes.until(lambda: self._is_there() or self.worker.done())
        if self.worker.done() and not self._is_there():
            try:
                raise NotPassed(f"{self.point} was not passed; the call returned {self.worker.result()}")
            except Gone:
                pass
        self.held = True
        if self.action == "kill":
            self.worker.process.join()
            assert self.worker.process.exitcode == -signal.SIGKILL
        return self

    def _is_there(self):
        if self.action == "kill":
            return not processes.alive(self.worker.pid)
        if self.action == "stop":
            return processes.state(self.worker.pid) == "T"
        return bool(select.select([self._reached], [], [], 0)[0]) and os.read(self._reached, 1) == b"r"

    @property
    def killed(self):
        return self.action == "kill"

    def let_go(self):
        """Let it go on."""
        self.held = False
        if self.action == "stop":
            self.worker.resume()
        else:
            os.close(os.open(self._fifo + ".go", os.O_WRONLY))

    def result(self):
        """Let it go on; what its call returned."""
        self.let_go()
        return self.worker.result()
