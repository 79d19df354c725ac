"""How long does one send take over Ray, RPC or torch.distributed, from the call until every worker has the weights?

    python bench/distributed.py                       every engine, 1 and 2 nodes, 1, 2, 4 and 8 workers
    python bench/distributed.py --quick               1 and 4 workers, few rounds
    python bench/distributed.py --engine rpc --workers 4 --nodes 2 --sizes "100 MB"
    python bench/distributed.py --out DIR             where distributed.json and .md go (default ./bench-results)

In each cell of a table shmsync's scheme, the same by node (fan_out="node"), TorchRL's scheme for the same engine and
the engine's bare means take turns, in the same processes, with the same module. In every worker each has its own
module, which has the weights when a send returns: copied into it, or bound to it. Checksums in every worker prove that
before anything is printed. Each process has one thread to compute. Only the ratios mean anything.

With one node all workers are beside the trainer. With two they are all on the other one. For Ray that is a second node
of a cluster in this machine, with its own store. For RPC and torch.distributed it is a name that is given to the
workers: a relay among them makes their arena, and everything goes over loopback. So the network costs nothing here: the
fewer copies cross it, the more a real one would favour.

The engine ray-zero-copy is Ray with RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 for all contestants.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from common import page
from common.row import Row, line
from remote.cell import WIDTHS
from remote.section import ENGINES, beside, cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 4 workers, few rounds")
    parser.add_argument("--engine", choices=ENGINES, nargs="*", default=list(ENGINES), help="default: all")
    parser.add_argument("--nodes", nargs="*", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--workers", nargs="*", type=int, help="default: 1 2 4 8")
    parser.add_argument("--sizes", nargs="*", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--seconds", type=float, help="for each row")
    parser.add_argument("--patience", type=float, default=300, help="seconds until a cell counts as hung")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it the cell
    seconds = (3.0 if options.quick else 15.0) if options.seconds is None else options.seconds
    workers = options.workers or ([1, 4] if options.quick else [1, 2, 4, 8])
    about = {"torch": torch.__version__, "processors": multiprocessing.cpu_count()}
    print(f"torch {about['torch']}, {about['processors']} processors, one thread each", flush=True)
    engines: dict[str, list[dict[str, Any]]] = {ENGINES[engine]: [] for engine in options.engine}
    rows: list[Row] = []
    for engine, nodes, count in itertools.product(options.engine, options.nodes, workers):
        for found in cell(engine, nodes, count, options.sizes, seconds, options.patience):
            engines[ENGINES[engine]].append(found)
            for row in beside(engine, found, all_bare=True):
                print(line(row), flush=True)
                rows.append(row)
        page.save(options.out / "distributed", about | {"engines": engines}, page.table(rows, {}))  # all takes long


if __name__ == "__main__":
    main()
