"""wait_version(spin=): a reader that keeps its processor for a while instead of sleeping."""

from __future__ import annotations

import math
import signal
import sys
import threading

import pytest

import shmsync
from shmsync import _native
from support.calls import Call
from support.faults.interrupts import Interrupt, on_alarm
from support.processes import until, until_waits
from support.weights import put

SLICE = 50_000_000  # ns


def wait(sub, version, **options):
    """(what wait_version() found, how often this thread slept in it)."""
    before = _native.sleeps()
    return sub.wait_version(version, **options), _native.sleeps() - before


def until_inside(call):
    """Until a call of wait(), which may never sleep, has begun."""

    def inside():
        frame = sys._current_frames().get(call.ident)
        while frame is not None and frame.f_code.co_name != "_wait_for":
            frame = frame.f_back
        return frame is not None

    until(inside)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("consistency", ["pinned", "optimistic", "live"])
@pytest.mark.parametrize("follow", [False, True])
def test_a_version_that_comes_meanwhile_is_found_without_sleeping(pair, subscriber, slots, consistency, follow):
    pub, _ = pair(slots=slots)
    sub = subscriber(pub, consistency=consistency, follow=follow)
    waiting = Call(wait, sub, 2, timeout=60, spin=math.inf)
    until_inside(waiting)
    assert put(pub, 2) == 2
    assert waiting.result() == (2, 0)
    assert sub.version == 1  # it applies nothing


def test_without_it_the_reader_sleeps(pair):
    pub, sub = pair()
    waiting = Call(wait, sub, 3, timeout=60)
    until_waits(waiting, "wait_version")
    put(pub, 2)  # not the one that it waits for
    put(pub, 3)
    found, sleeps = waiting.result()
    assert found == 3 and sleeps > 0


def test_it_ends_with_the_timeout_and_sleeps_when_it_is_over(pair):
    _, sub = pair()
    before = _native.sleeps()
    for spin in (math.inf, 3600):
        with pytest.raises(shmsync.PublishTimeout):
            sub.wait_version(2, timeout=0.12, spin=spin)
    assert sub.wait_version(1, spin=math.inf) == 1
    assert _native.sleeps() == before
    with pytest.raises(shmsync.PublishTimeout):
        sub.wait_version(2, timeout=0.12, spin=0.01)
    assert _native.sleeps() > before


def test_other_threads_have_the_interpreter_meanwhile(pair):
    _, sub = pair()
    go, ran = threading.Event(), []
    other = Call(lambda: (go.wait(), ran.append(True)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no thread takes the interpreter from this one: it has to give it
    try:
        go.set()
        for _ in range(400):
            if ran:
                break
            assert not sub._reader.wait_version_slice(2, SLICE, SLICE)
    finally:
        sys.setswitchinterval(before)
    other.result()
    assert ran


def test_a_signal_ends_it(pair):
    def handler(number, frame):
        raise Interrupt

    _, sub = pair()
    with on_alarm(handler):
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(Interrupt):
            sub.wait_version(2, timeout=math.inf, spin=math.inf)
    assert sub.wait_version(1) == 1


@pytest.mark.parametrize("end", ["pub", "sub"])
def test_close_ends_it(pair, end):
    pub, sub = pair()
    waiting = Call(wait, sub, 2, timeout=60, spin=math.inf)
    until_inside(waiting)
    (pub if end == "pub" else sub).close()
    with pytest.raises(shmsync.ClosedError):
        waiting.result()
