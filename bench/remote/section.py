"""Sends over Ray, RPC and torch.distributed: our scheme in both its ways beside TorchRL's, and beside bare calls."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import child
from common.clock import Clock
from common.environment import environment
from common.row import OK, Row

from remote.cell import BY_NODE, OURS, TORCHRL, WIDTHS

ENGINES = {"ray": "Ray", "ray-zero-copy": "Ray, zero-copy tensors", "rpc": "RPC", "distributed": "torch.distributed"}
MODULES = {"ray-zero-copy": "ray", "distributed": "gloo"}  # where a file is called otherwise
VARIABLES = {"ray-zero-copy": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}}  # of everything in a cell; elsewhere unset
WAYS = {OURS: "to each worker", BY_NODE: "by node"}
CELLS = ((1, 4), (2, 4), (1, 1), (2, 1))  # nodes, workers
PROGRAM = Path(__file__).with_name("cell.py")
Found = dict[str, Any]  # of one size in a cell


def ray(clock: Clock) -> Iterator[Row]:
    """Ray as it is by default, and with zero-copy tensors."""
    return rows(clock, "ray", "ray-zero-copy")


def rpc(clock: Clock) -> Iterator[Row]:
    return rows(clock, "rpc")


def distributed(clock: Clock) -> Iterator[Row]:
    return rows(clock, "distributed")


def rows(clock: Clock, *engines: str) -> Iterator[Row]:
    wanted = {f"{ENGINES[engine]}, {place(*where)}": (engine, *where) for where in CELLS for engine in engines}

    def measure(engine: str, nodes: int, workers: int) -> Iterator[Row]:
        seconds = min(3.0, clock.left / len(wanted) / 6)
        for found in cell(engine, nodes, workers, list(WIDTHS), seconds, max(120.0, clock.left)):
            yield from beside(engine, found)

    return clock.cells(wanted, 12, measure)


def cell(engine: str, nodes: int, workers: int, sizes: list[str], seconds: float, patience: float) -> list[Found]:
    """What each size gave, measured in fresh processes: those of RPC have one life."""
    with environment(), tempfile.TemporaryDirectory() as folder:
        for variable in (variable for variables in VARIABLES.values() for variable in variables):
            os.environ.pop(variable, None)
        os.environ |= VARIABLES.get(engine, {})
        result = Path(folder, "rows.json")
        trouble = child.run((PROGRAM, MODULES.get(engine, engine), nodes, workers, seconds, result, *sizes), patience)
        if trouble or not result.exists():
            raise SystemExit(f"{engine} with {workers} workers on {nodes} nodes failed: {trouble or 'no result'}")
        found: list[Found] = json.loads(result.read_text())
    return [each | {"nodes": nodes, "workers": workers} for each in found]


def beside(engine: str, found: Found, *, all_bare: bool = False) -> Iterator[Row]:
    """Each of our ways beside TorchRL's scheme, and beside all bare calls or the fastest of them."""
    spent = {name: (each["p50_ms"] * 1e3, each["p99_ms"] * 1e3) for name, each in found["contestants"].items()}
    bare = sorted((name for name in spent if name not in (*WAYS, TORCHRL)), key=spent.__getitem__)
    what = f"{ENGINES[engine]}, {found['size']}, {place(found['nodes'], found['workers'])}"
    for ours in filter(spent.__contains__, WAYS):  # RPC has no second way
        for theirs in filter(spent.__contains__, (TORCHRL, *(bare if all_bare else bare[:1]))):
            # cell.py compares digests of all workers before and after; another one ends the cell.
            yield Row(f"{what}, {WAYS[ours]}", spent[ours], theirs, spent[theirs], "1 x", OK)


def place(nodes: int, workers: int) -> str:
    return f"{nodes} node{'s' if nodes > 1 else ''}, {workers} worker{'s' if workers > 1 else ''}"
