"""What checksums cost: publish(), update() and sub.verify() with checksum=True beside checksum=False.

    .venv/bin/python bench/verify.py [--megabytes 100]

Each pair is measured in turns, and the smallest of many counts. Ratios compare; times are of one machine.
"""

from __future__ import annotations

import argparse
import time

import torch

import shmsync


def smallest(calls, rounds=15):
    """The smallest time of each call, measured in turns."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for number, call in enumerate(calls):
            began = time.perf_counter()
            call()
            best[number] = min(best[number], time.perf_counter() - began)
    return best


def update(pub):
    with pub.update():
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--leaves", type=int, default=100)
    arguments = parser.parse_args()
    words = int(arguments.megabytes * 1e6 / 4 / arguments.leaves)
    weights = {f"leaf{number}": torch.randn(words) for number in range(arguments.leaves)}
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    one = {"leaf0": weights["leaf0"]}
    with (
        shmsync.Publisher(weights) as plain,
        shmsync.Publisher(weights, checksum=True) as summed,
        shmsync.Subscriber(summed.handle) as sub,
    ):
        rows = {
            "publish()": (plain.publish, summed.publish),
            "publish(one leaf)": (lambda: plain.publish(one), lambda: summed.publish(one)),
            "update()": (lambda: update(plain), lambda: update(summed)),
        }
        print(f"{nbytes / 1e6:.1f} MB in {len(weights)} leaves")
        for name, calls in rows.items():
            without, with_sums = smallest(calls)
            print(f"{name:18} {without * 1e6:10.1f} µs  with checksums {with_sums * 1e6:10.1f} µs")
        (seconds,) = smallest([sub.verify])
        assert sub.verify().version == summed.version
        print(f"sub.verify()       {seconds * 1e6:10.1f} µs, {nbytes / seconds / 1e6:.0f} MB/s")


if __name__ == "__main__":
    main()
