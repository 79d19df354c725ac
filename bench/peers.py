"""One publication beside what people use today, from its start until all workers have computed with the new weights.

    make bench BENCH=peers                                    every peer; installs those that need other versions
    make bench BENCH=peers ARGS="--peers lock Ray --sizes 100 --workers 1 4"
    make bench BENCH=peers ARGS=--docs                        and puts the tables and the chart into docs/
    make bench BENCH=peers ARGS="--docs --from bench-results/peers.json"

Each peer has a trainer process, which makes new weights, publishes them and collects what the workers computed: the
smallest and the largest element of all. Both must be the value that all elements of the version have, so stale or torn
weights end the run with status 1. The peers take turns. The ratio is a peer's median to that of publish() with one slot
in the same heat: above 1 the peer takes longer.

Processor time is that of the trainer and of all processes below it, for one round. Memory is the PSS of the workers.
Start is the time from before the workers are started until each has computed with its first weights, while a fork
server, or Ray, already runs. At the end a worker is killed while it reads, and the trainer publishes once more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import machine, page
from peers import tables
from peers.contest import OURS, PEERS, SIMPLE, Cell, Death, absence, cell, contestants, death, heats
from peers.weights import SIZES, TINY

ROOT = Path(__file__).resolve().parents[1]
ALONE = "100 MB in 14 tensors"  # measured with one worker too


def measure(names: list[str], places: list[tuple[str, int]], seconds: float, patience: float) -> dict[str, Any]:
    cells: list[Cell] = []
    deaths: dict[str, dict[str, Any]] = {}
    for heat in heats(names):
        with contestants(heat) as peers:
            for size, workers in places:
                for each in cell(peers, size, workers, seconds):
                    print(f"{tables.place(each)}  {tables.line(each)}", flush=True)
                    cells.append(each)
            for each in peers:
                size, workers = places[0]
                if each.name not in deaths and workers > 1:
                    found = death(each, size, workers, patience)
                    print(f"{each.name}: {tables.fate(found)}", flush=True)
                    deaths[each.name] = found._asdict()
    about = {
        "processors": os.cpu_count(), "kernel": platform.release(), "arch": platform.machine(),
        "python": platform.python_version(), "torch": version("torch"), "load": os.getloadavg()[0],
    }  # fmt: skip
    return {"machine": about, "cells": [each._asdict() for each in cells], "deaths": deaths}


def about(found: dict[str, Any]) -> str:
    return (
        "{processors} processors, {arch}, kernel {kernel}, Python {python}, torch {torch}; "
        "load at the end {load:.1f}.".format(**found["machine"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", default=[""], help="parts of their names; default: all")
    parser.add_argument("--simple", action="store_true", help="only those that need no other package")
    parser.add_argument("--sizes", nargs="*", default=[""], help="parts of their names; default: all")
    parser.add_argument("--workers", nargs="*", type=int, help="default: 4, and 1 with 100 MB")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each size in each heat, about")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds until a publication counts as blocked")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/")
    parser.add_argument("--root", type=Path, default=ROOT, help="where docs/ is")
    parser.add_argument("--from", dest="earlier", type=Path, help="measure nothing: the peers.json of an earlier run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it the peers
    if options.earlier is not None:
        found = json.loads(options.earlier.read_text())
    else:
        machine.adopt_orphans()
        wanted = [name for name in PEERS if name == OURS or any(part in name for part in options.peers)]
        wanted = [name for name in wanted if name in SIMPLE or not options.simple]
        known = SIZES if options.sizes == [""] else SIZES | TINY
        sizes = [size for size in known if any(part in size for part in options.sizes)]
        places = [(size, workers) for workers in options.workers or [4] for size in sizes]
        if options.workers is None and ALONE in sizes:
            places.append((ALONE, 1))
        missing = {name: why for name in wanted if (why := absence(name))}
        for name, why in missing.items():
            print(f"{name}: {why}", flush=True)
        names = [name for name in wanted if name not in missing]
        found = measure(names, places, options.seconds, options.patience) | {"missing": missing}
    cells = [Cell(**each) for each in found["cells"]]
    deaths = [Death(**each) for each in found["deaths"].values()]
    gone = "".join(f"\nNot in this run: {name}, {why}.\n" for name, why in found["missing"].items())
    costs, short = (f"{about(found)}\n{gone}\n{table}" for table in (tables.costs(cells), tables.short(cells, deaths)))
    print(f"\n{costs}\n{short}")
    if options.earlier is None:
        page.save(options.out / "peers", found, f"{costs}\n{short}")
    if options.docs:
        page.paste(options.root / "docs" / "performance.md", "peers", costs)
        page.paste(options.root / "docs" / "comparison.md", "peers", short)
        if (drawing := tables.chart(cells)) is not None:
            (options.root / "docs" / "plots" / "peers.svg").write_text(drawing)
    if bad := tables.bad(cells, deaths):
        raise SystemExit(f"{len(bad)} failed: {'; '.join(bad)}")


if __name__ == "__main__":
    main()
