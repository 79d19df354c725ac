"""Is the engine as fast as its floor? Each row is a ratio, or a cost, measured beside its floor in the same run.

    make bench BENCH=engine                     every row
    make bench BENCH=engine ARGS="copy calls"   some of them
    make bench BENCH=engine ARGS="--out DIR"    where engine.json and engine.md go (default ./bench-results)

These are the rows of the table's sections, without a limit of time. Each checks the bytes that arrived. Machines are
noisy: rows alternate with their floor, and only ratios mean anything.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import multiprocessing
from pathlib import Path

import torch
from common import page
from common.clock import Clock
from sections import SECTIONS

NAMES = ("calls", "readers", "learner", "copy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*NAMES, []], help="default: all")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {multiprocessing.cpu_count()} processors")
    modules = [importlib.import_module(SECTIONS[name].module) for name in arguments.sections or NAMES]
    rows = itertools.chain.from_iterable(module.rows(Clock(math.inf)) for module in modules)
    page.show(rows, arguments.out / "engine")


if __name__ == "__main__":
    main()
