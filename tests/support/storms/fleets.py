"""The schemes that a storm goes over: the fleets of the conformance suite, with workers that compute all the time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from support.conformance import table
from support.storms.model import Weather


@dataclass
class Over:
    """A scheme: its entry of the conformance suite, and the options of the scheme."""

    entry: object
    options: dict
    partial: bool = False  # can workers be reached one by one?


STORMS = {
    "multiprocess": Over(table.MP, {}, partial=True),
    "shared-memory": Over(table.SHM, {}),
    "shared-memory-3": Over(table.SHM, {"slots": 3}),
}


class Call:
    """One call of a sender, and what became of it.

    sent_by: the send_async() that a wait_async() waits for: what it began may have been answered before the wait.
    """

    def __init__(self, name, what, timeout, sent_by=None):
        self.name, self.what, self.timeout, self.sent_by = name, what, timeout, sent_by
        self.start = self.end = 0
        self.waited = 0.0  # seconds in which its process could have run, and the machine ran others
        self.value = self.error = None

    @property
    def sent(self):
        """When the sending began, in ns."""
        return self.start if self.sent_by is None else self.sent_by.start

    def __str__(self):
        return f"{self.name}({self.what}, timeout={self.timeout})"


def waits():
    """How long each of Python's threads here has waited for a processor, in ns; nothing if the kernel does not count.

    Another thread that waits for one, the hand of the storm, may have the interpreter's lock meanwhile.
    """
    found = Counter()
    for thread in threading.enumerate():
        with contextlib.suppress(OSError, IndexError):
            found[thread.native_id] = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1])
    return found


def waited_since(before):
    """Seconds that they have waited since waits() gave that."""
    return (waits() - before).total() / 1e9


def timed(function, kwargs):
    """(start, end, waited, value, error) of a call."""
    value = error = None
    before, start = waits(), time.monotonic_ns()
    try:
        value = function(**kwargs)
    except Exception as caught:
        error = caught
    end = time.monotonic_ns()
    return start, end, waited_since(before), value, error


def take(call, found):
    call.start, call.end, call.waited, call.value, call.error = found


def carry_out(sender, call, kwargs):
    take(call, timed(getattr(sender, call.name), kwargs))


def source(form, number):
    """Weights of this number, in one of the forms that a send takes."""
    model = Weather(number)
    if form == "module":
        return model
    if form == "state_dict":
        return model.state_dict()
    from tensordict import TensorDict

    return TensorDict.from_module(model).data


FORMS = ("module", "module", "state_dict", "tensordict")
