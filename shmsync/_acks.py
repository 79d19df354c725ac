"""Waiting until workers have applied a version, and naming those that have not."""

from __future__ import annotations

import time

from . import _native
from ._process import Peers, ProcessState, pid_of
from .errors import AckTimeout, WorkerDied

_SLICE_NS = 50_000_000

Row = tuple[int, int]  # (row, owner)


def wait_for_acks(
    writer: _native.Writer,
    control: _native.Control,
    peers: Peers,
    version: int,
    workers: list[int] | tuple[()],
    deadline: float,
    me: int,
) -> None:
    """Return when all have acked `version`. `workers`: () means the rows claimed now, a list those indices, attached
    or not. Those who leave cleanly meanwhile are dropped, unless they were named and nobody took their index over.

    Raises WorkerDied as soon as only dead ones are left to wait for, AckTimeout at the deadline.
    """
    everybody = not workers and isinstance(workers, tuple)
    rows: list[Row] = [(row, owner) for row, owner in writer.claimed_rows()]
    dead: dict[Row, int | str] = {}
    done: set[int | str] = set()  # workers seen to ack, or to leave
    while True:
        pending = rows if everybody else _rows_of(control, set(workers), version)
        names = {row: _name(control, row) for row in pending}
        remaining = max(0, int(min(deadline - time.monotonic(), 1.0) * 1e9))
        rows = [tuple(row) for row in writer.wait_acks(version, pending, min(remaining, _SLICE_NS))]
        done.update(name for row, name in names.items() if row not in rows)
        for row in [row for row in rows if not peers.alive(row[1])]:
            # It may have acked between our look and its death.
            if writer.wait_acks(version, [row], 0):
                dead[row] = names[row]
                control.reap(*row, me)  # the next publish does not wait for it
            rows.remove(row)
        absent = [] if everybody else _not_acked(control, workers, version, done | set(dead.values()))
        if not rows and not absent:
            break
        if time.monotonic() >= deadline:
            late: list[int | str] = [_name(control, row) for row in rows]
            late += [worker for worker in absent if worker not in late]
            states = [peers.state(owner) for _, owner in rows]
            stopped = (
                f" ({states.count(ProcessState.STOPPED)} of them stopped)" if ProcessState.STOPPED in states else ""
            )
            raise AckTimeout(
                f"version {version} is published, but {_listed(late)} did not apply it in time{stopped}; a worker "
                "applies at its next read section or refresh()"
                + (f"; dead: {_listed(list(dead.values()))}" if dead else ""),
                version=version,
                missing=[*late, *dead.values()],
            )
        if not rows:
            time.sleep(0.0005)  # a named worker that has not attached yet
    if dead:
        raise WorkerDied(
            f"version {version} is published, but {_listed(list(dead.values()))} died before applying it; all others "
            "have it, and the next publish does not wait for the dead",
            version=version,
            missing=list(dead.values()),
        )


def _rows_of(control: _native.Control, workers: set[int], version: int) -> list[Row]:
    return [
        (row, owner)
        for row, owner in control.owners()
        if control.row(row)[3] in workers and control.row(row)[2] < version
    ]


def _not_acked(
    control: _native.Control, workers: list[int] | tuple[()], version: int, settled: set[int | str]
) -> list[int]:
    acked = set(settled)
    for row, _ in control.owners():
        _, _, ack, worker, *_ = control.row(row)
        if ack >= version:
            acked.add(worker)
    return [worker for worker in workers if worker not in acked]


def _name(control: _native.Control, row: Row) -> int | str:
    worker = control.row(row[0])[3]
    return worker if worker >= 0 else f"pid {pid_of(row[1])}"


def _listed(missing: list[int | str]) -> str:
    return ", ".join(f"worker {name}" if isinstance(name, int) else name for name in missing)
