"""What each call of a storm owed, compared with what was done to the workers and what they computed with."""

from __future__ import annotations

import math
import time

from shmsync import AckTimeout, ReaderStalled, WorkerDied

GRACE = 0.1  # seconds beyond a deadline
CALM = 3.0  # a call with so much time, and no trouble, returns
SETTLED = 0.5  # a worker that had applied so long before the deadline was not late


class Violation(AssertionError):
    """A promise was broken."""


class Judge:
    """Takes every call with its outcome, and raises Violation."""

    def __init__(self, lateness):
        self._lateness = lateness
        self.worst_overrun = -math.inf

    def check(self, call, chosen, number, everybody, is_dead):
        """`chosen`: the Lives that the call went to; `number`: that of its weights; everybody: all lives; is_dead: what
        the sender says of a worker by its index."""
        self.ended(call, call.start, call.end, call.timeout, call.waited)
        if call.error is None:
            self._success(call, chosen, number)
        elif isinstance(call.error, (WorkerDied, AckTimeout)):
            self._names(call, chosen, number, is_dead)
        elif not isinstance(call.error, ReaderStalled):
            raise Violation(f"{call} raised {call.error!r}") from call.error
        touched = not all(life.whole and life.untouched(call.start, call.end) for life in everybody)
        if call.error is not None and not touched and call.timeout >= CALM:
            raise Violation(f"{call} raised, though nothing was done to anybody: {call.error!r}") from call.error
        self.look(everybody)

    def ended(self, what, start, end, timeout, waited):
        """A call is over; times in ns, `timeout` and what the process `waited` for a processor in seconds."""
        late = (end - start) / 1e9 - timeout
        self.worst_overrun = max(self.worst_overrun, late)
        if late > GRACE:
            machine = self._lateness.between(start, end) + waited
            if late > GRACE + machine:
                raise Violation(f"{what} ended {late:.3f} s after its deadline; the machine was {machine:.3f} s late")

    def _success(self, call, chosen, number):
        for life in chosen:
            if life.dead_since < call.sent and not life.reported and not _had_it(life, number):
                raise Violation(f"{call} returned, but worker {life.index} was dead before it began")
            if life.stopped_since < call.sent and not life.reported and life.row.get("changes"):
                raise Violation(f"{call} returned, but worker {life.index} stood still all the time")
            if life.whole and not life.reported:
                life.least = max(life.least, number)
                self._await_forward(call, life)

    def _await_forward(self, call, life):
        """Its next forward computes with what was sent."""
        until = time.monotonic() + 60
        while life.row.last()[0] <= call.end:
            if not life.whole:
                return  # it has not come to that
            if life.worker.done():
                try:
                    ended = f"returned {life.worker.result()!r}"
                except Exception as error:
                    ended = f"failed: {error!r}{error.__cause__ or ''}"
                raise Violation(f"{call} returned, but then worker {life.index} {ended}")
            if time.monotonic() > until:
                raise Violation(f"{call} returned, but worker {life.index} computes no more")
            time.sleep(0.0005)
        if life.row.last()[1] < life.least:
            raise Violation(
                f"{call} returned, but worker {life.index} computes with {life.row.last()[1]}, not with {life.least}"
            )

    def _names(self, call, chosen, number, is_dead):
        lives = {life.index: life for life in chosen}
        for index in call.error.missing:
            if index not in lives:
                raise Violation(f"{call} names worker {index}, which it did not go to: {call.error}")
            life = lives[index]
            if life.reported and not all(each.reported for each in chosen):  # when no worker is left, all are named
                raise Violation(f"{call} names worker {index} a second time: {call.error}")
            seen = life.row.seen(number) if number else None  # 0: each has its own
            if life.untouched(call.start, call.end) and seen is not None:
                # One that had it before the call still has to answer this call's message.
                early = call.timeout - max(0.0, (seen - call.start) / 1e9)
                if early > SETTLED + self._lateness.between(call.start, call.end):
                    raise Violation(
                        f"{call} names worker {index}, which computed with it {early:.3f} s before the deadline: "
                        f"{call.error}"
                    )
        for life in chosen:
            if life.reported:
                continue
            named = life.index in call.error.missing
            if life.dead_since < call.sent and not named and not _had_it(life, number):
                raise Violation(f"{call} does not name worker {life.index}, which was dead: {call.error}")
            stopped = life.stopped_since < call.sent
            if stopped and life.index not in call.error.missing:
                raise Violation(f"{call} does not name worker {life.index}, which stood still: {call.error}")
        if isinstance(call.error, WorkerDied):
            dying = [index for index in call.error.missing if lives[index].doomed]
            if not dying:
                raise Violation(f"{call} says that workers died, but nobody did: {call.error}")
            for life in chosen:  # others that are dying were only late when it looked
                life.reported |= life.index in dying and is_dead(life.index)

    def look(self, everybody):
        """What the workers saw since."""
        for life in everybody:
            for what in ("torn", "wrong", "backwards"):
                if life.row.get(what):
                    raise Violation(f"worker {life.index} saw weights that are {what}: {life.row.get('detail')}")
            for _, number in life.row.numbers():
                if number and number not in life.sent:
                    raise Violation(f"worker {life.index} computes with {number}, which was not sent to it")


def await_computing(life, condition):
    """Until the worker computes, or computes so. Violation: it has ended instead, or takes too long."""
    until = time.monotonic() + 60
    while not condition():
        ended = life.whole and life.worker.done()
        if ended or time.monotonic() > until:
            raise Violation(f"worker {life.index} does not compute; {life.worker.result() if ended else ''}")
        time.sleep(0.001)


def _had_it(life, number):
    """Did it exit with its work done?"""
    return life.left and life.row.last()[1] >= max(number, life.least)
