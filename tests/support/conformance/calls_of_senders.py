"""What a trainer does with its sender, in several threads and against the clock."""

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
        return [(sender.send(Stamped(number), timeout=ENOUGH), number) for number in range(first, first + rounds)]

    calls = [Call(send, 1 + rounds * thread) for thread in range(threads)]
    return sorted(pair for call in calls for pair in call.result())


def overrun(sender, name, timeout):
    """(what calls of this timeout raised, the smallest overrun in seconds): a busy machine delays some of them."""
    said, smallest = set(), float("inf")
    for number in range(10):
        if number >= 3 and smallest < 0.1:
            break
        start = time.monotonic()
        try:
            getattr(sender, name)(*([] if name == "wait_async" else [Stamped(7)]), timeout=timeout)
            said.add("returned")
        except Exception as error:
            said.add(type(error).__name__)
            smallest = min(smallest, time.monotonic() - start - timeout)
    return said, smallest


def overrun_beside(sender, name, timeout):
    """As overrun(), while another thread is inside send() all the time."""
    done = threading.Event()

    def send():
        with contextlib.suppress(Exception):
            sender.send(Stamped(1), timeout=ENOUGH)
        done.set()

    other = Call(send)
    until_waits(other, "send")
    found = overrun(sender, name, timeout)
    assert not done.is_set()
    return found
