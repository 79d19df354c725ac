"""How long does one synchronous send take, from the call until every worker has applied the weights?

    python bench/schemes.py                      every size, with 1, 2, 4 and 8 workers
    python bench/schemes.py --quick              4 workers, less than a minute
    python bench/schemes.py --workers 4 --sizes 5k --contestants shmsync
    python bench/schemes.py --out DIR            where schemes.json and schemes.md go (default ./bench-results)

shmsync's two schemes, TorchRL's two (the same module, workers and start method), and a raw pipe ping-pong with one
memcpy of the bytes take turns in one run, each library in its own trainer process, each process with one thread to
compute. Only the ratios mean anything.

"alias" means that the trainer's own parameters are the shared memory, so that nothing is copied: what TorchRL's schemes
do on the CPU to the module that they are given.

After each row checksums prove that every worker has the weights of the last send, and the trainer its own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import torch
from common import models, page
from common.clock import Clock
from common.row import Row
from sends.section import CONTESTANTS, QUEUES, RAY, cell, contestants_of


def rows(names: list[str], sizes: list[str], workers: list[int], options: argparse.Namespace) -> Iterator[Row]:
    with contestants_of(names, options.patience) as contestants:
        for size in sizes:
            for count in workers:
                yield from cell(contestants, size, count, options.seconds)
    if options.kills:
        from sends import deaths  # not above: workers import this file, and the floor's do not need shmsync

        yield from deaths.rows(Clock(math.inf), options.kills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 workers, few sends")
    parser.add_argument("--sizes", nargs="*", default=[""], help="parts of their names; default: all")
    parser.add_argument("--workers", nargs="*", type=int, help="default: 1 2 4 8")
    parser.add_argument("--contestants", nargs="*", default=[""], help="parts of their names; default: all")
    parser.add_argument("--seconds", type=float, help="for each row")
    parser.add_argument("--kills", type=int, help="0: leave out the row about deaths")
    parser.add_argument("--patience", type=float, default=20, help="seconds until a contestant counts as hung")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    quick = options.quick
    options.seconds = (2.0 if quick else 8.0) if options.seconds is None else options.seconds
    options.kills = (5 if quick else 20) if options.kills is None else options.kills
    names = [name for name in CONTESTANTS if any(part in name for part in options.contestants)]
    if options.contestants == [""]:
        names = [name for name in names if name not in (QUEUES, RAY)]  # by their names only
    sizes = [size for size in models.SIZES if any(part in size for part in options.sizes)]
    print(f"torch {torch.__version__}, {multiprocessing.cpu_count()} processors, one thread each")
    workers = options.workers or ([4] if quick else [1, 2, 4, 8])
    page.show(rows(names, sizes, workers, options), options.out / "schemes")


if __name__ == "__main__":
    main()
