"""Does a learner lose time to the arena when its workers keep every processor busy?"""

from __future__ import annotations

import multiprocessing.connection
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from common.clock import Clock, Job
from common.measure import CONTEXT, processes, rounds, row, timed
from common.row import Row
from torch import nn

import shmsync


def rows(clock: Clock) -> Iterator[Row]:
    jobs = []
    for how, slots in (("publish()", 3), ("update()", 1), ("publish()", 2)):
        jobs.append(Job(partial(measure_learner, how, slots), 1, f"learner's step with {how}, slots = {slots}"))
    return clock.rows(jobs)


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


PRIVATE, BOUND, END = range(3)


def busy_reader(handle: shmsync.Handle, mode: Any, pipe: multiprocessing.connection.Connection) -> None:
    with shmsync.Subscriber(handle, timeout=60) as sub, torch.no_grad():
        modules = {PRIVATE: policy(), BOUND: sub.bind(policy())}
        x = torch.randn(8, 64)
        while (now := mode.value) != END:
            modules[now](x)
        pipe.send(sub.stats())


def measure_learner(how: str, slots: int) -> Iterator[Row]:
    """A learner's step while 4 workers compute without pause, with the arena's weights or with private ones."""
    # Two of the same shape: one publishes. An adopted one could not step outside update() any more.
    learners = {PRIVATE: policy(), BOUND: policy()}
    optimizers = {kind: torch.optim.Adam(each.parameters(), lr=1e-3, fused=True) for kind, each in learners.items()}
    x, target = torch.randn(512, 64), torch.randn(512, 8)
    mode, pipes = CONTEXT.RawValue("i", PRIVATE), [CONTEXT.Pipe() for _ in range(4)]
    with (
        shmsync.Publisher(learners[BOUND], slots=slots, timeout=60) as pub,
        processes(busy_reader, [(pub.handle, mode, theirs) for _, theirs in pipes]),
    ):
        while len(pub.readers()) < 4:
            time.sleep(0.01)
        if slots == 1:
            pub.adopt(learners[BOUND])

        def step(kind: int) -> None:
            optimizers[kind].zero_grad()
            (learners[kind](x) - target).square().mean().backward()
            if kind == BOUND and slots == 1:
                with pub.update():
                    optimizers[kind].step()
            else:
                optimizers[kind].step()
                if kind == BOUND:
                    pub.publish()

        times: dict[int, list[float]] = {PRIVATE: [], BOUND: []}
        for block in rounds(60, fewest=2):  # both kinds meet the same slow moments of the machine
            now = mode.value = (PRIVATE, BOUND)[block % 2]
            step(now)
            times[now] += [timed(lambda now=now: step(now)) for _ in range(20)]
        mode.value = END
        stats = [pipe.recv() for pipe, _ in pipes]
        bound = learners[BOUND]
        assert all(torch.equal(pub.weights[str(i)]["weight"], bound[i].weight) for i in (0, 2, 4)), "checksum"
        what = f"learner's step with {how}, slots = {slots}, 4 busy readers"
        yield row(f"{what} / without arena", times[BOUND], times[PRIVATE], "1.05 x")
        mean = [statistics.fmean(times[kind]) for kind in (BOUND, PRIVATE)]
        pins = pub.stats().pin_wait.total / sum(times[BOUND])
        waits = sum(one.wait.count for one in stats)
        print(
            f"    mean {mean[0] * 1e6:.0f} / {mean[1] * 1e6:.0f} us = {mean[0] / mean[1]:.2f}; waiting for pins "
            f"{pins:.1%} of the step (at most 3 % on slots = 1); reader waits {waits} (0 on slots = 3)"
        )
