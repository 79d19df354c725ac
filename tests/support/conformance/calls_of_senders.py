"""What a trainer does with its sender, in several threads and against the clock."""

from __future__ import annotations

import time

from support.conformance.nets import Stamped

ENOUGH = 60.0  # seconds: more than anything here takes


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
