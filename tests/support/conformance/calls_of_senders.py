"""What a trainer does with its sender, in several threads and against the clock. Runs where the trainer is."""

from __future__ import annotations

import contextlib
import threading
import time

from support.calls import Call
from support.conformance.nets import Stamped
from support.processes import until_waits

ENOUGH = 60.0  # seconds: more than anything here takes


def send_from_threads(sender, threads, rounds):
    """Each thread sends its own numbers; [(version, number)] of all sends, in the order of their versions."""

    def send(first):
        found = []
        for number in range(first, first + rounds):
            found.append((sender.send(Stamped(number), timeout=ENOUGH), number))
        return found

    calls = [Call(send, 1 + rounds * thread) for thread in range(threads)]
    return sorted(pair for call in calls for pair in call.result())


def outcome_of(sender, name, timeout, width=4):
    """(what a call of this timeout raised, or "returned"; the seconds by which it outlived its deadline)"""
    net = None if name in ("resend", "wait_async") else Stamped(7, width)
    start = time.monotonic()
    try:
        getattr(sender, name)(*([] if net is None else [net]), timeout=timeout)
        said = "returned"
    except Exception as error:
        said = type(error).__name__
    return said, time.monotonic() - start - timeout


def overrun(sender, name, timeout, width=4, times=10):
    """What the calls said, and the smallest overrun: a busy machine delays some of them, and then gets more."""
    found = []
    for number in range(times):
        if number >= 3 and any(late < 0.1 for said, late in found if said != "returned"):
            break
        if name == "async":
            found += [outcome_of(sender, "send_async", timeout, width)]
            found += [outcome_of(sender, "wait_async", timeout)] if found[-1][0] == "returned" else []
        else:
            found.append(outcome_of(sender, name, timeout, width))
    return {said for said, _ in found}, min(late for said, late in found if said != "returned")


def overrun_beside(sender, name, timeout, times=10):
    """As overrun(), while another thread is inside send() all the time."""
    done = threading.Event()

    def send():
        with contextlib.suppress(Exception):
            sender.send(Stamped(1), timeout=ENOUGH)
        done.set()

    other = Call(send)
    until_waits(other, "send")
    found = []
    while len(found) < 3 or (min(late for _, late in found) >= 0.1 and len(found) < times):
        found.append(outcome_of(sender, name, timeout))
    assert not done.is_set()
    return {said for said, _ in found}, min(late for _, late in found)
