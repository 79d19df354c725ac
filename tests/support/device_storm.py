"""A trainer and workers on the simulated device, each with a stream of its own, without pause.

Every number of a version is its number; kernels look at them when they run, which is after their section.
`make storm-device` runs a long one.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from typing import NamedTuple

import torch

import shmsync
from support.simulated import Simulated, everywhere

WORDS = 64


class Counted(NamedTuple):
    """What a storm has seen."""

    publishes: int
    reads: int
    wrong: int  # reads that saw something else than their section's version


def storm(device: Simulated, publishes: int, *, slots: int, readers: int = 3, seed: int = 0) -> Counted:
    """Publish so often from the device's memory and in place, while readers ask for kernels."""
    there = device.tensor(torch.full((WORDS,), 1.0))
    halves = there[: WORDS // 2], there[WORDS // 2 :]
    stream, chance, over = device.stream(), random.Random(seed), threading.Event()
    counts: list[list[int]] = []

    def fill(parts, value):
        for part in parts:
            device.kernel(lambda part=part: part.fill_(value))

    def read(handle, number):
        seen, kernels = [0, 0], device.stream()
        counts.append(seen)

        def look(weights, version):
            seen[0] += 1
            seen[1] += not bool((weights == version).all())

        with shmsync.Subscriber(handle, worker=number, timeout=60.0) as sub:
            while not over.is_set() or seen[0] == 0:
                with device.on(kernels), sub.read() as section:
                    weights, version = section.weights["t"], section.version
                    device.kernel(lambda weights=weights, version=version: look(weights, version))

    with shmsync.Publisher({"t": there}, slots=slots, timeout=60.0) as pub:
        threads = [threading.Thread(target=read, args=(pub.handle, number)) for number in range(readers)]
        for thread in threads:
            thread.start()
        try:
            with device.on(stream):
                for version in range(2, publishes + 2):
                    if chance.random() < 0.2:
                        with pub.update() as weights:
                            there_now = weights["t"]
                            fill((there_now[: WORDS // 2], there_now[WORDS // 2 :]), version)
                    else:
                        fill(halves, version)
                        pub.publish({"t": there})
                        fill(halves, -version)  # the next step of the trainer
                pub.publish({"t": torch.full((WORDS,), float(publishes + 2))}, wait=[])
        finally:
            over.set()
            for thread in threads:
                thread.join()
    return Counted(publishes + 1, *(sum(each) for each in zip(*counts, strict=True)))


def main() -> int:
    """Storms of many publishes, one for each number of slots; 1 if a kernel has seen another version."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--publishes", type=int, default=100_000, help="in all")
    parser.add_argument("--slots", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=0.0001, help="seconds of the longest delay")
    asked = parser.parse_args()
    wrong = 0
    for slots in asked.slots:
        started = time.monotonic()
        with everywhere(asked.seed, asked.longest) as device:
            each = -(-asked.publishes // len(asked.slots))
            counted = storm(device, each, slots=slots, readers=asked.readers, seed=asked.seed)
        wrong += counted.wrong
        print(
            f"{slots} slots, {asked.readers} readers: {counted.publishes:,} publishes, {counted.reads:,} reads by "
            f"kernels, {counted.wrong} wrong, {time.monotonic() - started:.0f} s",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
