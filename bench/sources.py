"""What other sources than a module cost, and many leaves: each row beside its floor, in one run.

    make bench BENCH=sources                  every row
    make bench BENCH=sources ARGS="carry bind"  some of them

These are the rows of the table's section, without its limit of time and with more leaves.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from common import page
from common.clock import Clock
from sections import sources

KINDS = ("dict", "carry", "bind", "snapshot", "filter", "small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*KINDS, []], help="default: all")
    parser.add_argument("--leaves", type=int, nargs="*", default=[*sources.LEAVES, 16000])
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    page.show(sources.rows(Clock(math.inf), arguments.leaves, arguments.rows), arguments.out / "sources")


if __name__ == "__main__":
    main()
