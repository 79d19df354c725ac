"""Carry out a checked plan in one arena: get a slot to write, write, commit, wait for acks."""

from __future__ import annotations

import time

from ..copy.copy_plan import CopyPlan
from .acks import Acks
from .writing import WriteSide


def publish_plan(
    side: WriteSide,
    plan: CopyPlan,
    deadline: float,
    acks: Acks | None = None,
    version: int | None = None,
    after: object = None,
) -> int:
    """Carry out a checked plan; the new version. `version`: this one instead of the next; `after`: as in order()."""
    if acks is not None:
        side.refuse_wait(acks)
    if not plan.conversions.none or after is not None:
        side.writes.order(plan, after, deadline)
        plan.conversions.stage()
    started = time.perf_counter()
    try:
        if not side.begin_at_once(version):
            begin(side, deadline, version)
        side.write(plan, after)
        version = side.commit()
    except BaseException:  # an interrupt may land anywhere
        side.undo()
        raise
    side.counts.published(time.perf_counter() - started)
    if acks is not None:
        side.wait_acks(version, acks, deadline)
    return version


def begin(side: WriteSide, deadline: float, version: int | None = None) -> None:
    """Get a slot to write, or raise with nothing written; the caller undoes.

    The gate does not stay closed for a process that is stopped: it is opened until that goes on, so that other readers
    go on with the old version. A reader that runs is waited for with the gate closed, since it leaves its section soon.

    version: the one that is written next, None for the next.
    """
    side.touched = False
    side.pin_wait.died.clear()
    while True:
        if version is not None:
            side.skip_to(version)
        if side.begin(deadline):
            return
        side.writer.abort()
        side.wait_while_stopped(deadline)
