"""The cost of one call in a separate process: sections, guards, update(), moving to a version, attaching."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from common.clock import Clock, Job
from common.measure import Loop, per_call, rounds, row, timed
from common.row import Row
from torch import nn

import shmsync


def rows(clock: Clock) -> Iterator[Row]:
    return clock.rows(
        [
            Job(call_rows, 3, "read(), refresh(), a guarded forward"),
            Job(update_rows, 1, "update() around nothing", cost=1),
            Job(move_rows, 1, "move to a new version"),
            Job(attach_rows, 1, "attach to 1 GB", cost=2),
        ]
    )


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def call_rows() -> Iterator[Row]:
    with shmsync.Publisher(Identity()) as pub, shmsync.Subscriber(pub.handle) as sub:

        def read(n: int) -> None:
            for _ in range(n):
                with sub.read():
                    pass

        def refresh(n: int) -> None:
            for _ in range(n):
                sub.refresh()

        x = torch.zeros(1)
        bound, free = sub.bind(Identity()), Identity()

        def guarded(n: int) -> None:
            for _ in range(n):
                bound.forward(x)

        def unguarded(n: int) -> None:
            for _ in range(n):
                free.forward(x)

        yield per_call("read section, enter and leave", read, "0.3 us")
        yield per_call("refresh(), nothing new", refresh, "0.1 us")
        yield per_call("guarded forward / unguarded", guarded, "+ 0.6 us", unguarded)


def update_rows() -> Iterator[Row]:
    def updates(pub: shmsync.Publisher) -> Loop:
        def update(n: int) -> None:
            for _ in range(n):
                with pub.update():
                    pass

        return update

    with (
        shmsync.Publisher({"t": torch.zeros(1 << 18)}) as small,
        shmsync.Publisher({"t": torch.zeros(400 << 18)}) as large,
    ):
        what = "update() around nothing, 400 MB / 1 MB"
        yield per_call(what, updates(large), "1 x, 3 us", updates(small), calls=2000)


def move_rows() -> Iterator[Row]:
    module = nn.Sequential(*[nn.Linear(44, 44) for _ in range(100)])
    with torch.no_grad(), shmsync.Publisher(module, slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        bound = sub.bind(nn.Sequential(*[nn.Linear(44, 44) for _ in range(100)]))
        x = torch.randn(8, 44)
        moves, forwards = [], []
        for _ in rounds(200):
            pub.publish()
            moves.append(timed(sub.refresh))
            forwards.append(timed(lambda: bound(x)))
        assert torch.equal(bound(x), module(x)), "checksum"
        yield row("move to a new version, 200 tensors / one forward", moves, forwards, "0.1 x")


def attach_rows() -> Iterator[Row]:
    with shmsync.Publisher({"t": torch.ones(1 << 28)}) as pub:
        samples = []
        for _ in rounds(10):
            start = time.perf_counter()
            sub = shmsync.Subscriber(pub.handle)
            samples.append(time.perf_counter() - start)
            assert sub.weights["t"][-1] == 1, "checksum"
            sub.close()
        yield row("attach to 1 GB", samples, aim="10000 us")
