"""What one call costs when nobody else is there: sections, guards, update(), moving to a version, attaching."""

from __future__ import annotations

import time

import torch
from measure import per_call, report, timed
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
        per_call("unguarded forward (to take off the next row)", unguarded, "-")
        per_call("guarded forward", guarded, "0.6 us more")


def update_rows() -> None:
    for megabytes in (1, 400):
        with shmsync.Publisher({"t": torch.zeros(megabytes << 18)}) as pub:

            def update(n: int, pub: shmsync.Publisher = pub) -> None:
                for _ in range(n):
                    with pub.update():
                        pass

            per_call(f"update() around nothing, {megabytes} MB", update, "3 us", 2000)


def move_rows() -> None:
    module = nn.Sequential(*[nn.Linear(44, 44) for _ in range(100)])
    with torch.no_grad(), shmsync.Publisher(module, slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        bound = sub.bind(nn.Sequential(*[nn.Linear(44, 44) for _ in range(100)]))
        x = torch.randn(8, 44)
        moves, forwards = [], []
        for _ in range(200):
            pub.publish()
            moves.append(timed(sub.refresh))
            forwards.append(timed(lambda: bound(x)))
        assert torch.equal(bound(x), module(x)), "checksum"
        report("move to a new version, 200 tensors / one forward", moves, forwards, "0.1 x")


def attach_rows() -> None:
    with shmsync.Publisher({"t": torch.ones(1 << 28)}) as pub:
        samples = []
        for _ in range(10):
            start = time.perf_counter()
            sub = shmsync.Subscriber(pub.handle)
            samples.append(time.perf_counter() - start)
            assert sub.weights["t"][-1] == 1, "checksum"
            sub.close()
        report("attach to 1 GB", samples, None, "10000 us")
