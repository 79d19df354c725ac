"""The helper that actors are forked from. It imports what they need once, while the learner imports its own.

Four actors that import torch each for themselves take twice as long, on two cores, as a helper and a learner.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

PRELOADED = ["torch", "tensordict", "gymnasium", "shmsync.engine.subscriber", __name__.replace("helper", "actor")]


def context() -> ForkServerContext:
    """How to start actors; begins with the helper itself. Idempotent."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    # Children inherit blocked signals: Ctrl-C must not find one that has not yet said what it does about it. The
    # other process of multiprocessing goes first, because starting it unblocks them.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return found
