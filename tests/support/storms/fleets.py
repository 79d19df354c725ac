"""The schemes that a storm goes over: the fleets of the conformance suite, with workers that compute all the time."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from support.conformance import table
from support.conformance.fleet import Crew
from support.conformance.fleet_processes import DistributedWorld, RPCWorld, WorldCrew
from support.conformance.fleet_ray import RayCrew
from support.storms.model import Weather
from support.worker import fork_server


@dataclass
class Over:
    """A scheme: its entry of the conformance suite, the options of the scheme, and what starts its workers."""

    entry: object
    crew: object
    options: dict
    partial: bool = False  # can workers be reached one by one?
    pipes: bool = False


def pipe_crew():
    return Crew(fork_server())


STORMS = {
    "multiprocess": Over(table.MP, pipe_crew, {}, partial=True, pipes=True),
    "shared-memory": Over(table.SHM, pipe_crew, {}, pipes=True),
    "shared-memory-3": Over(table.SHM, pipe_crew, {"slots": 3}, pipes=True),
    "ray": Over(table.RAY[0], RayCrew, {}, partial=True),
    "rpc": Over(table.RPC[0], partial(WorldCrew, RPCWorld), {}, partial=True),
    "distributed": Over(table.DISTRIBUTED[0], partial(WorldCrew, DistributedWorld), {}, partial=True),
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
    """(start, end, waited, value, error) of a call, where the trainer is."""
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


def call_here(sender, call, kwargs):
    take(call, timed(getattr(sender, call.name), kwargs))


def call_there(sender, call, kwargs):
    """The same for a trainer in a separate process."""
    take(call, sender._trainer.call(run_there, sender.key, call.name, kwargs))


def run_there(state, key, name, kwargs):
    sender = state.schemes[key].get_sender()
    if "weights" in kwargs:
        kwargs = {**kwargs, "weights": source(*kwargs["weights"])}
    found = timed(getattr(sender, name), kwargs)
    if found[-1] is not None:
        found[-1].__traceback__ = None
        pickle.loads(pickle.dumps(found[-1]))
    return found


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


def is_remote(sender):
    """Is it in a separate process?"""
    return hasattr(sender, "_trainer")
