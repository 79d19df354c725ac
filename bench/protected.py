"""What it costs that an adopted module's memory is read-only outside update().

`python bench/protected.py [MEGABYTES ...]` alternates updates with and without the protection in one process and prints
p50 and p99 of each, in microseconds: around nothing, and around a step of SGD and of Adam. docs/adr/0039 has a table.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import shmsync

TENSORS = 5


def percentile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1e6


def row(nbytes: int, name: str, rounds: int) -> None:
    module = nn.ParameterList(nn.Parameter(torch.randn(nbytes // 4 // TENSORS)) for _ in range(TENSORS))
    for parameter in module:
        parameter.grad = torch.full_like(parameter, 1e-3)
    kinds = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
    with shmsync.Publisher(module) as pub:
        optimizer = kinds[name](module.parameters(), lr=1e-4) if name in kinds else None
        pub.adopt(module, optimizer)
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * rounds + 4):
            protected = turn % 2 == 0
            if protected:
                pub._writer.side.adopted.protect(pub._writer.side.writer)
            else:
                pub._writer.side.writer.unprotect()
            started = time.perf_counter()
            with pub.update():
                if optimizer is not None:
                    optimizer.step()
            if turn >= 4:
                times[protected].append(time.perf_counter() - started)
        without, with_it = (
            f"{percentile(times[p], 0.5):9.1f} {percentile(times[p], 0.99):9.1f}" for p in (False, True)
        )
        print(f"{nbytes / 1e6:8.2f} MB  {name:8} without {without}   protected {with_it}", flush=True)


if __name__ == "__main__":
    for size in [float(each) for each in sys.argv[1:]] or [0.02, 1.0, 10.0, 100.0, 1000.0]:
        for what in ("nothing", "SGD", "Adam"):
            row(int(size * 1e6), what, 5 if size > 500 else 12 if size > 50 else 60 if size > 5 else 400)
