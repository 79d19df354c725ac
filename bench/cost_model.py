"""What would a send cost on many nodes? A model with four numbers, fitted to bench/distributed.py and checked by it.

    python bench/distributed.py --out DIR
    python bench/cost_model.py DIR/distributed.json                    # 100 MB, 8 workers a node, 10 Gbit/s
    python bench/cost_model.py DIR/distributed.json --megabytes 1 --gigabits 100

A send of S bytes to N far nodes with W workers each takes

    start  +  message · messages  +  copy · S · copies in a row  +  link · S · transfers in a row

                      messages         copies in a row                 transfers in a row
    by node           N + N·W          pack, publish                   N on the trainer's link
    to each worker    N·W              pack, W / processors of a node  N·W on the trainer's link (Ray: N)

`start`, `message`, `copy` and `link` are fitted, for each engine, to the rows with 1 and 4 workers, and then asked to
foretell the others. Beyond this machine `link` is at least what the given bandwidth allows.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy
from remote.cell import BY_NODE, OURS

Row = dict[str, Any]
FITTED_TO = (1, 4)  # workers


def work(engine: str, by_node: bool, nodes: int, workers: int, processors: int, *, home: bool) -> list[float]:
    """[1, messages, copies in a row, transfers in a row] of one send; `home`: the workers are beside the trainer."""
    if by_node and home:
        return [1, workers, 1, 0]
    if by_node:
        return [1, nodes + nodes * workers, 2, nodes]
    by_store = engine.startswith("Ray")
    transfers = nodes if by_store else nodes * workers
    return [1, nodes * workers, 1 + workers / min(processors, workers), 0 if home and by_store else transfers]


def features(engine: str, row: Row, way: str, processors: int) -> numpy.ndarray:
    parts = work(engine, way == BY_NODE, 1, row["workers"], processors, home=row["nodes"] == 1)
    return numpy.array(parts[:2] + [part * row["bytes"] for part in parts[2:]], dtype=float)


def fit(inputs: numpy.ndarray, seconds: numpy.ndarray, scale: numpy.ndarray | None = None) -> numpy.ndarray:
    """Least squares of the error relative to `scale`, by default to the measured time; no number is negative.

    That is the best of all choices of the numbers that are 0.
    """
    scale = seconds if scale is None else scale
    scaled, target = inputs / scale[:, None], seconds / scale
    best, error = numpy.zeros(inputs.shape[1]), numpy.inf
    for count in range(1, inputs.shape[1] + 1):
        for chosen in itertools.combinations(range(inputs.shape[1]), count):
            found = numpy.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            residue = float(numpy.sum((scaled[:, chosen] @ found - target) ** 2))
            if (found >= 0).all() and residue < error:
                best, error = numpy.zeros(inputs.shape[1]), residue
                best[list(chosen)] = found
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--workers", type=int, default=8, help="of each node")
    parser.add_argument("--processors", type=int, default=8, help="of each node")
    parser.add_argument("--gigabits", type=float, default=10, help="per second, of the trainer's link")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    for engine, rows in results["engines"].items():
        ways = [way for way in (BY_NODE, OURS) if all(way in row["contestants"] for row in rows)]  # RPC has one
        cases = [(row, way) for row in rows for way in ways]
        inputs = numpy.array([features(engine, row, way, results["processors"]) for row, way in cases])
        seconds = numpy.array([row["contestants"][way]["p50_ms"] / 1e3 for row, way in cases])
        known = numpy.array([row["workers"] in FITTED_TO for row, _ in cases])
        start, message, copy, link = numbers = fit(inputs[known], seconds[known])
        rates = [1e-9 / max(each, 1e-15) for each in (copy, link)]
        print(f"\n{engine}: start {start * 1e3:.2f} ms, message {message * 1e3:.3f} ms", end="")
        print(f", copy {rates[0]:.1f} GB/s, link {rates[1]:.1f} GB/s")
        off = inputs @ numbers / seconds
        for name, which in (("fitted rows", known), ("foretold rows", ~known)):
            if which.any():
                worst = max(off[which].max(), 1 / off[which].min())
                middle = numpy.median(off[which])
                print(f"  {name}: {which.sum()}, predicted / measured p50 {middle:.2f}, worst off by {worst:.2f} x")
        size, bandwidth = arguments.megabytes * 1e6, arguments.gigabits / 8 * 1e9
        for by_node in [way == BY_NODE for way in ways]:
            cells = []
            for nodes in (10, 100, 1000):
                parts = work(engine, by_node, nodes, arguments.workers, arguments.processors, home=False)
                total = start + message * parts[1] + size * (copy * parts[2] + parts[3] / bandwidth + link)
                cells.append(f"{nodes} nodes {total:,.2f} s, {size * parts[3] / 1e9:,.0f} GB")
            print(f"  {'by node' if by_node else 'to each worker'}: " + "; ".join(cells))


if __name__ == "__main__":
    main()
