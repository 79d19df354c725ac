"""The rows of engines for several machines: our scheme in both its ways beside TorchRL's, and beside bare calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import distributed
from clock import Clock
from distributed_cell import BY_NODE, OURS, TORCHRL, WIDTHS
from row import OK, Row

WAYS = {OURS: "to each worker", BY_NODE: "by node"}
CELLS = {
    "1 node, 4 workers": (1, 4),
    "2 nodes, 4 workers": (2, 4),
    "1 node, 1 worker": (1, 1),
    "2 nodes, 1 worker": (2, 1),
}


def rows(clock: Clock, *engines: str) -> Iterator[Row]:
    wanted = {f"{distributed.ENGINES[engine]}, {where}": (engine, where) for where in CELLS for engine in engines}
    for name in clock.cells(list(wanted), cost=12):
        engine, where = wanted[name]
        seconds = min(3.0, clock.left / len(wanted) / 6)
        for found in distributed.cell(engine, *CELLS[where], list(WIDTHS), seconds, max(120.0, clock.left)):
            yield from _rows(distributed.ENGINES[engine], found, where)
    for name in clock.over:
        yield clock.left_out(name)


def _rows(engine: str, found: dict[str, Any], where: str) -> Iterator[Row]:
    contestants = found["contestants"]
    bare = min(
        (name for name in contestants if name not in (*WAYS, TORCHRL)), key=lambda name: contestants[name]["p50_ms"]
    )
    for ours, way in WAYS.items():
        for theirs in filter(contestants.__contains__, (TORCHRL, bare)):
            pairs = [tuple(contestants[name][f"{p}_ms"] * 1e3 for p in ("p50", "p99")) for name in (ours, theirs)]
            # distributed_cell.py compares digests of all workers before and after; another one ends the cell.
            yield Row(f"{engine}, {found['size']}, {where}, {way}", pairs[0], theirs, pairs[1], "1 x", OK)  # fmt: skip
