"""What one call costs when nobody else is there: sections, guards, update(), moving to a version, attaching."""

from __future__ import annotations

import time

import torch
from measure import Loop, per_call, report, rounds, timed
from torch import nn

import shmsync


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def call_rows() -> None:
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

        per_call("read section, enter and leave", read, "0.3 us")
        per_call("refresh(), nothing new", refresh, "0.1 us")
        per_call("guarded forward / unguarded", guarded, "+ 0.6 us", unguarded)


def update_rows() -> None:
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
        per_call("update() around nothing, 400 MB / 1 MB", updates(large), "1 x, 3 us", updates(small), calls=2000)


def move_rows() -> None:
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
        report("move to a new version, 200 tensors / one forward", moves, forwards, "0.1 x")


def attach_rows() -> None:
    with shmsync.Publisher({"t": torch.ones(1 << 28)}) as pub:
        samples = []
        for _ in rounds(10):
            start = time.perf_counter()
            sub = shmsync.Subscriber(pub.handle)
            samples.append(time.perf_counter() - start)
            assert sub.weights["t"][-1] == 1, "checksum"
            sub.close()
        report("attach to 1 GB", samples, None, "10000 us")
