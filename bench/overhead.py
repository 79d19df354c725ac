"""What a feature costs: protection of adopted memory. Each call with it, beside the same without.

    python bench/overhead.py                                   all of it
    python bench/overhead.py protection --megabytes 1 100      with other sizes
    python bench/overhead.py --out DIR                         where overhead.json and .md go (default ./bench-results)

protection  update() of an adopted module, around nothing, and around a step of SGD and of Adam. docs/adr/0039 has one.

Both are measured in turns in one process. Ratios compare; times are of one machine.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common import page
from common.measure import row, timed
from common.row import Row
from torch import nn

import shmsync

TENSORS = 5  # of an adopted module


def update(pub: shmsync.Publisher) -> None:
    with pub.update():
        pass


def protection(sizes: list[float]) -> Iterator[Row]:
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
    for size, name in itertools.product(sizes or [0.02, 1.0, 10.0, 100.0, 1000.0], ("nothing", *kinds)):
        words = int(size * 1e6) // 4 // TENSORS
        module = nn.ParameterList(nn.Parameter(torch.randn(words)) for _ in range(TENSORS))
        for parameter in module:
            parameter.grad = torch.full_like(parameter, 1e-3)
        with shmsync.Publisher(module) as pub:
            optimizer = kinds[name](module.parameters(), lr=1e-4) if name in kinds else None
            pub.adopt(module, optimizer)
            side = pub._writer.side

            def step(pub: shmsync.Publisher = pub, optimizer: torch.optim.Optimizer | None = optimizer) -> None:
                with pub.update():
                    if optimizer is not None:
                        optimizer.step()

            protected, plain = [], []
            for number in range(2 + rounds_of(size)):
                side.adopted.protect(side.writer)
                with_it = timed(step)
                side.writer.unprotect()
                without = timed(step)
                if number >= 2:
                    protected.append(with_it)
                    plain.append(without)
            yield row(f"update() around {name}, {size:g} MB, protected / unprotected", protected, plain)


def rounds_of(megabytes: float) -> int:
    return next(rounds for most, rounds in ((5, 400), (50, 60), (500, 12), (1e9, 5)) if megabytes <= most)


KINDS = {"protection": protection}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="default: all")
    parser.add_argument("--megabytes", type=float, nargs="*", default=[], help="of the weights")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    rows = itertools.chain.from_iterable(KINDS[kind](options.megabytes) for kind in options.kinds or KINDS)
    page.show(rows, options.out / "overhead")


if __name__ == "__main__":
    main()
