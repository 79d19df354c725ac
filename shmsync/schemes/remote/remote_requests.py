"""Requests to other processes, and one wait for all of them.

A RemoteSend has Steps. Each step makes one request (a Call) to one worker or relay (a Destination), and what
became of it goes into the Outcome, which raises what went wrong.

INV: a destination has at most one request under way; the next one starts when the last has been answered. So a worker
that does not answer costs one message, not one for each send, and its late answer counts for nothing but itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import Self, override

from ... import _native
from ...engine.outcome import Failure, Outcome, Wording
from ...errors import WriterBusy
from .location import Location

SLICE = 0.05  # seconds; how long a wait lasts before everything is looked at again
WORDING = Wording("its process may be starting, stopped, or busy with a call that came before")


class Gone(Exception):
    """The process behind a destination is dead, or cannot be reached.

    Args:
        how: what is known of it.
        final: it is gone for good, so later sends leave it out.
    """

    def __init__(self, how: str, *, final: bool = True) -> None:
        super().__init__(how)
        self.final = final


class Failed(Exception):
    """The request raised an exception there, or its answer is none."""

    def __init__(self, failure: Failure | str) -> None:
        super().__init__(failure)
        self.failure = failure


class Call(ABC):
    """A request under way. Each kind of network has its own."""

    payload: Any = None  # kept until the answer is there: the network may still read it

    @abstractmethod
    def finished(self) -> bool:
        """Has it been answered, or has its process died? Never waits."""

    @abstractmethod
    def result(self) -> Any:
        """The answer, once it is finished. Raises Gone, Failed."""


class Answered(Call):
    """Already answered; nothing was sent."""

    def __init__(self, answer: Any = None) -> None:
        self._answer = answer

    @override
    def finished(self) -> bool:
        return True

    @override
    def result(self) -> Any:
        return self._answer


class Destination:
    """A worker or a relay, as its sender knows it."""

    call: Call | None = None  # the request under way
    location: Location | None = None  # where it runs, once that is known
    dead = False  # a request has found it so
    reported = False  # and a send has reported it: later ones leave it out
    host: Destination | None = None  # of a relay: the worker in whose process it is; None: a separate process
    starting: _native.WriterLock  # held by the thread that starts a request

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make one; subclasses need not call __init__()."""
        made = super().__new__(cls)
        made.starting = _native.WriterLock()
        return made

    @property
    def busy(self) -> bool:
        """Is an earlier request not answered yet?"""
        call = self.call  # another thread may look too
        if call is not None and call.finished() and self.call is call:
            self.call = None
        return self.call is not None


@dataclass(eq=False)
class Step:
    """One request of a send.

    Args:
        name: of the destination: a worker's index, or words such as "the relay on node a".
        start: starts the request.
        then: gets the answer, or Gone or Failed; it may add steps.
        record: whether the outcome tells what became of it.
        forgive: gets a failure; True: it is handled, and the outcome leaves it out.
    """

    name: int | str
    destination: Destination
    start: Callable[[], Call]
    then: Callable[[Any], None] | None = None
    record: bool | Literal["failures"] = True
    forgive: Callable[[Any], bool] | None = None
    call: Call | None = None

    def advance(self) -> bool:
        """Start it if its destination is free; is it finished?"""
        if self.call is None:
            try:
                with self.destination.starting:
                    if self.destination.busy:
                        return False
                    self.call = self.destination.call = self.start()
            except WriterBusy:  # another thread is about to start one
                return False
        return self.call.finished()


class RemoteSend:
    """The steps of one send, and what came of them.

    Args:
        wait: waits until one of these calls is finished, but no longer than so many seconds.
        wording: of the errors.
    """

    def __init__(self, wait: Callable[[Collection[Call], float], None], wording: Wording = WORDING) -> None:
        self._wait = wait
        self._open: list[Step] = []
        self.outcome = Outcome(wording)
        self.unreached: set[int] = set()  # workers whose own step waits for another

    def add(self, step: Step) -> None:
        """Begin it if possible; finish() carries it out."""
        self._open.append(step)
        self._look(step)

    def finish(self, deadline: float) -> None:
        """Carry out every step, until the deadline. The outcome lists the late workers and relays."""
        while True:
            for step in list(self._open):
                self._look(step)
            if not self._open:
                break
            rest = deadline - time.monotonic()
            if rest <= 0:
                break
            calls = [step.destination.call for step in self._open]
            self._wait([call for call in calls if call is not None], min(rest, SLICE))
        outcome = self.outcome
        late = [step.name for step in self._open if step.name not in outcome.dead]
        outcome.late = sorted({*late, *self.unreached}, key=_order)
        # Errors list them by index, not in the order of their answers.
        outcome.dead = {name: outcome.dead[name] for name in sorted(outcome.dead, key=_order)}
        outcome.failed = {name: outcome.failed[name] for name in sorted(outcome.failed, key=_order)}

    def check(self, what: str, version: int | None, destinations: Mapping[int, Destination]) -> None:
        """Raise what went wrong, if anything did; the dead are left out by later sends then."""
        for name in self.outcome.dead:
            if name in destinations and destinations[name].dead:
                destinations[name].reported = True
        self.outcome.check(what, version)

    def _look(self, step: Step) -> None:
        result: Any
        outcome, record = self.outcome, step.record
        try:
            if not step.advance():
                return
            assert step.call is not None
            result = step.call.result()
            if record is True and step.name not in outcome.done:
                outcome.done.append(step.name)
        except Gone as gone:
            result = gone
            step.destination.location = None  # after a restart it may be elsewhere
            step.destination.dead = gone.final
            if record:
                outcome.dead[step.name] = str(gone)
        except Failed as failed:
            result = failed
            step.destination.location = None
        self._open.remove(step)
        if step.destination.call is step.call:
            step.destination.call = None
        if isinstance(result, Failed) and record and not (step.forgive and step.forgive(result.failure)):
            outcome.failed[step.name] = result.failure
        if step.then is not None:
            step.then(result)


def _order(name: Any) -> tuple[bool, Any]:
    return isinstance(name, str), name
