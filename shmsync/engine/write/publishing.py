"""Carry out checked plans, in one arena or in several at once: get a slot to write, write, commit, wait for acks."""

from __future__ import annotations

import time
from collections.abc import Sequence

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
            begin_all([side], deadline, version)
        side.write(plan, after)
        side.add_sums(deadline)
        version = side.commit()
    except BaseException:  # an interrupt may land anywhere
        side.undo()
        raise
    side.counts.published(time.perf_counter() - started)
    if acks is not None:
        side.wait_acks(version, acks, deadline)
    return version


def publish_plans(plans: Sequence[tuple[WriteSide, CopyPlan]], version: int | None, deadline: float) -> list[int]:
    """Carry out each plan in its arena: all of the versions become visible, or none does. Waits for no acks."""
    for side, plan in plans:
        if not plan.conversions.none:
            side.writes.order(plan, None, deadline)
            plan.conversions.stage()
    started = time.perf_counter()
    versions = []
    uncommitted = [side for side, _ in plans]
    try:
        begin_all(uncommitted, deadline, version)
        for side, plan in plans:
            side.write(plan)
        for side, _ in plans:
            side.add_sums(deadline)
        while uncommitted:
            versions.append(uncommitted[0].commit())
            uncommitted.pop(0).counts.published(time.perf_counter() - started)
    except BaseException:
        for side in uncommitted:
            side.undo()
        raise
    return versions


def begin_all(sides: Sequence[WriteSide], deadline: float, version: int | None = None) -> None:
    """Get a slot to write in each of these, or raise with nothing written; the caller undoes.

    No gate stays closed for a process that is stopped: all are opened until it goes on, so that other readers go on
    with the old version. A reader that runs is waited for with the gates closed, since it leaves its section soon.

    version: the one that is written next, None for each one's own.
    """
    for side in sides:
        side.touched = False
        side.pin_wait.died.clear()
    while True:
        for side in sides:
            if version is not None:
                side.skip_to(version)
            if not side.begin(deadline):
                break
        else:
            return
        for each in sides:
            each.writer.abort()
        side.wait_while_stopped(deadline)
