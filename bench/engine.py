"""Is the engine as fast as its floor? Each row is a ratio, or a cost, measured beside its floor in the same run.

    make bench BENCH=engine                     every row
    make bench BENCH=engine ARGS="copy calls"   some of them
    make bench BENCH=engine ARGS="--out DIR"    where engine.json and engine.md go (default ./bench-results)

Prints p50 and p99. Each row checks the bytes that arrived before it prints. Machines are noisy: rows alternate with
their floor, and only ratios mean anything.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path

import torch
from call_rows import attach_rows, call_rows, move_rows, update_rows
from copy_rows import copy_rows
from learner_rows import learner_rows
from measure import RESULTS, WIDTH, markdown
from reader_rows import ack_rows, sleeper_rows

torch.set_num_threads(1)

ROWS = {
    "calls": call_rows, "update": update_rows, "acks": ack_rows, "sleepers": sleeper_rows, "move": move_rows,
    "attach": attach_rows, "learner": learner_rows, "copy": copy_rows,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="default: all")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {multiprocessing.cpu_count()} processors")
    print(f"{'':{WIDTH}} {'p50 us':>11} {'p99 us':>11} {'floor p50':>11} {'ratio':>7} {'p99':>7}   at most")
    for name in arguments.rows or ROWS:
        ROWS[name]()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "engine.json").write_text(json.dumps(RESULTS, indent=2))
    (arguments.out / "engine.md").write_text(markdown())


if __name__ == "__main__":
    main()
