"""What a trace costs: read sections and publishes of a small model, while they are traced and while they are not.

    .venv/bin/python bench/trace.py

The two are measured in turns in one process, p50 and p99 of many. Ratios compare; times are of one machine. The
versions that the sections have seen are checked at the end.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import quantiles

import torch

import shmsync

ROUNDS, CALLS = 40, 500


def section(sub, seen):
    with sub.read() as inside:
        seen.append(inside.version)


def update(pub):
    with pub.update():
        pass


def timed(call):
    """Microseconds of each of many calls."""
    found = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e6)
    return found


def main():
    weights = {f"leaf{number}": torch.randn(500) for number in range(10)}
    seen = []
    with (
        tempfile.TemporaryDirectory() as folder,
        shmsync.Publisher(weights) as pub,
        shmsync.Subscriber(pub.handle) as sub,
    ):
        rows = {
            "read section": lambda: section(sub, seen),
            "publish()": pub.publish,
            "update()": lambda: update(pub),
        }
        file = Path(folder, "trace.json")
        for name, call in rows.items():
            figures: list[list[float]] = [[], []]
            for number in range(2 * ROUNDS):
                traced = number % 2
                with pub.trace(file) if traced else nullcontext():
                    section(sub, [])  # it joins in, or sees that the trace is over
                    figures[traced] += timed(call)
            plain, traced = ((cuts[49], cuts[98]) for cuts in (quantiles(each, n=100) for each in figures))
            print(
                f"{name:13} p50 {plain[0]:6.2f} µs  traced {traced[0]:6.2f} µs    "
                f"p99 {plain[1]:6.2f} µs  traced {traced[1]:6.2f} µs"
            )
        assert len(seen) == 2 * ROUNDS * CALLS and set(seen) == {1}
        lines = file.read_text().count("\n")
        print(f"{lines:,} events, {os.stat(file).st_size / lines:.0f} bytes each")


if __name__ == "__main__":
    main()
