"""Frames per second of MultiprocessCollector beside TorchRL's collectors, with a sync of the weights after every batch.

    python bench/collectors.py --workers 4 --frames 20000 --rounds 3
    python bench/collectors.py --gymnasium [--quick] [--only CartPole]    # beside Gymnasium's own loops instead

These are the rows of the table's sections "collectors" and "environments", with more frames, and with two schemes of
TorchRL. The sections say what is checked.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import torch
from common import page
from common.clock import Clock
from sections import collectors, environments

SCHEMES = (collectors.SCHEME, "MultiProcessWeightSyncScheme")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=400)
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gymnasium", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a quarter of the frames beside Gymnasium")
    parser.add_argument("--only", default="", help="a part of the names of rows beside Gymnasium")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.gymnasium:
        scale = 1 if options.quick else 4
        rows = environments.rows(Clock(math.inf), options.rounds, scale, options.only)
        page.show(rows, options.out / "environments")
        return
    of_a_pass = collectors.Options(options.workers, options.batch, options.frames)
    each = [
        collectors.beside(sync, of_a_pass, SCHEMES, lambda passes: passes >= options.rounds)
        for sync in ("sync", "async")
    ]
    page.show(itertools.chain.from_iterable(each), options.out / "collectors")


if __name__ == "__main__":
    main()
