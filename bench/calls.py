"""What the calls of a training loop cost beyond their floor: publish(), refresh(), a guarded forward, update(), step().

    make bench BENCH=calls
    make bench BENCH=calls ARGS="--out DIR"     where calls.json and calls.md go (default ./bench-results)

Each row alternates with its floor: one copy of the same bytes, the plain forward, or the plain step. Aims are those of
torch 2.10 or newer on a machine that does nothing else; only rows of one run can be compared.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import torch
from common import page
from common.clock import Clock
from common.measure import per_call, rounds, row, side_by_side, timed
from common.row import Row
from torch import nn

import shmsync


def layers(tensors: int, width: int = 14, buffers: int = 0) -> nn.Module:
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(tensors // 2)])
    for number in range(buffers):
        module.register_buffer(f"buffer{number}", torch.zeros(width))
    return module


def publish_rows(tensors: int) -> Iterator[Row]:
    module = layers(tensors)
    flat = torch.cat([each.detach().flatten() for each in module.parameters()])
    target = torch.empty_like(flat)
    with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub:
        aim = f"+ {6 + 0.07 * tensors:g} us"
        what = f"publish(module), {tensors} tensors / memcpy"
        yield side_by_side(what, lambda: pub.publish(module), lambda: target.copy_(flat), 2000, aim)
        state = module.state_dict()
        what = f"publish(state_dict), {tensors} tensors / publish(module)"
        yield side_by_side(what, lambda: pub.publish(state), lambda: pub.publish(module), 2000, "1.25 x")
        assert all(torch.equal(sub.state_dict()[key], value) for key, value in state.items()), "checksum"


def refresh_rows(tensors: int, slots: int, buffers: int = 0) -> Iterator[Row]:
    module, worker = layers(tensors, 4, buffers), layers(tensors, 4, buffers)
    with shmsync.Publisher(module, slots=slots) as pub, shmsync.Subscriber(pub.handle) as sub:
        sub.bind(worker)
        samples = []
        for _ in rounds(2000):
            pub.publish()
            samples.append(timed(sub.refresh))
        aim = 1.5 + 0.15 * buffers if slots == 1 else 2 + 0.12 * (tensors + buffers)
        yield row(f"refresh(), slots={slots}, {tensors} tensors, {buffers} buffers", samples, aim=f"{aim:g} us")


def guard_rows() -> Iterator[Row]:
    module, worker, x = nn.Linear(4, 2), nn.Linear(4, 2), torch.ones(1, 4)
    with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub, torch.no_grad():
        sub.bind(worker)

        def calls(net: nn.Module, n: int) -> None:
            for _ in range(n):
                net(x)

        what = "guarded forward of Linear(4, 2) / unguarded"
        yield per_call(what, lambda n: calls(worker, n), "+ 0.25 us", lambda n: calls(module, n), 5000)


def update_rows(tensors: int, width: int) -> Iterator[Row]:
    module = layers(tensors, width)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    megabytes = sum(parameter.nbytes for parameter in module.parameters()) / 1e6
    size = f"{megabytes:.2g} MB in {tensors} tensors"
    with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub:

        def update() -> None:
            with pub.update():
                pass

        yield row(f"update() around nothing, {size}", [timed(update) for _ in rounds(2000)], aim="4 us")
        plain = optimizer.step
        what = f"step() and publish(), {size} / the plain step"
        yield side_by_side(what, lambda: (plain(), pub.publish()), plain, 300, "")
        pub.adopt(module, optimizer)
        adopted = [timed(update) for _ in rounds(2000)]
        yield row(f"update() around nothing, adopted, {size}", adopted, aim=f"{4 + 0.07 * tensors:g} us")

        private = layers(tensors, width)
        private.load_state_dict(module.state_dict())
        other = torch.optim.SGD(private.parameters(), lr=1e-6)
        for parameter in private.parameters():
            parameter.grad = torch.ones_like(parameter)
        aim = f"+ {4 + 0.07 * tensors:g} us"
        what = f"step() of an adopted module, {size} / the plain step"
        yield side_by_side(what, optimizer.step, other.step, 300, aim)
        state = sub.state_dict()
        assert all(torch.equal(state[key], value) for key, value in module.state_dict().items()), "checksum"


def rows() -> Iterator[Row]:
    for tensors in (2, 200, 1000):
        yield from publish_rows(tensors)
    for tensors in (2, 200, 1000):
        yield from refresh_rows(tensors, 1)
        yield from refresh_rows(tensors, 3)
    yield from refresh_rows(2, 1, 100)
    yield from guard_rows()
    for tensors, width in ((2, 50), (14, 185), (14, 1850)):
        yield from update_rows(tensors, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {multiprocessing.cpu_count()} processors")
    Clock(math.inf).row(1)
    page.show(rows(), arguments.out / "calls")


if __name__ == "__main__":
    main()
