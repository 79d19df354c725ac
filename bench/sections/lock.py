"""What most people write first: module.share_memory() and one multiprocessing.Lock.

Either each forward holds the lock, or a worker that sees a new number copies the weights for itself under the lock and
computes outside of it. The trainer writes every 5 ms. All contestants take turns in the same workers.
"""

from __future__ import annotations

import itertools
import multiprocessing.connection
import time
from collections.abc import Iterator

import torch
from common import models
from common.clock import Clock
from common.measure import CONTEXT, percentiles, processes, rate, timed
from common.row import OK, Row, times
from torch import nn

import shmsync

WORKERS = 4
EVERY = 0.005  # seconds between two publishes
OURS, HELD, COPIED, END = range(4)
NAMES = {HELD: "lock held in each forward", COPIED: "lock, a copy in each worker"}


def policy() -> nn.Module:
    sizes = [64, 512, 512, 512, 512, 8]
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers).requires_grad_(False)


class Shared:
    """What all processes have; inherited by fork."""

    def __init__(self) -> None:
        self.module = policy().share_memory()
        self.number = CONTEXT.RawValue("l", 0)  # of the weights in it
        self.lock = CONTEXT.Lock()
        self.mode = CONTEXT.RawValue("i", OURS)
        self.forwards = CONTEXT.RawArray("l", WORKERS)


def work(handle: shmsync.Handle, shared: Shared, index: int, pipe: multiprocessing.connection.Connection) -> None:
    with shmsync.Subscriber(handle, worker=index, timeout=60) as sub, torch.no_grad():
        bound, private = sub.bind(policy()), policy()
        x, seen = torch.randn(8, 64), -1
        while (mode := shared.mode.value) != END:
            if mode == OURS:
                bound(x)
            elif mode == HELD:
                with shared.lock:
                    shared.module(x)
            else:
                if shared.number.value != seen:
                    with shared.lock:
                        seen = shared.number.value
                        copy(private, shared.module)
                private(x)
            shared.forwards[index] += 1
        sub.refresh()
        with sub.read():
            digests = [models.digest(models.tensors(bound))]
        with shared.lock:
            digests.append(models.digest(models.tensors(shared.module)))
            copy(private, shared.module)
        pipe.send([*digests, models.digest(models.tensors(private))])


def copy(target: nn.Module, source: nn.Module) -> None:
    torch._foreach_copy_(models.tensors(target), models.tensors(source))


def rows(clock: Clock) -> Iterator[Row]:
    trainer, shared = policy(), Shared()
    writes, speeds, versions = ({mode: [] for mode in (OURS, HELD, COPIED)} for _ in range(3))
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(WORKERS)]
    with (
        shmsync.Publisher(trainer, slots=3, timeout=60) as pub,
        processes(work, [(pub.handle, shared, index, ours) for index, (_, ours) in enumerate(pipes)]) as workers,
    ):
        pub.wait_readers(list(range(WORKERS)), procs=workers, timeout=60)

        def locked() -> None:
            with shared.lock:
                copy(shared.module, trainer)
                shared.number.value += 1

        turns = 0
        while turns < 2 or (clock.left > 1 and turns < 30):
            for mode in speeds:
                shared.mode.value = mode
                time.sleep(0.01)  # a forward of the turn before ends
                done, written, start = sum(shared.forwards), len(writes[mode]), time.perf_counter()
                while (now := time.perf_counter()) < start + 0.2:
                    models.step(trainer)
                    writes[mode].append(timed(pub.publish if mode == OURS else locked))
                    time.sleep(max(0.0, now + EVERY - time.perf_counter()))
                seconds = time.perf_counter() - start
                speeds[mode].append((sum(shared.forwards) - done) / seconds)
                versions[mode].append((len(writes[mode]) - written) / seconds)
            turns += 1
        models.randomize(trainer)
        pub.publish()
        locked()
        shared.mode.value = END
        expected = models.digest(models.tensors(trainer))
        found = [ours.recv() for ours, _ in pipes]
    check = OK if found == [[expected] * 3] * WORKERS else f"WRONG: workers have {found}, the trainer {expected}"
    size = f"{models.nbytes(trainer) / 1e6:.1f} MB every 5 ms"
    for mode, name in NAMES.items():
        peer = f"share_memory(), {name}"
        for what, of in ((f"forwards of {WORKERS} workers", speeds), ("versions written", versions)):
            yield Row(f"{what}, {size}", rate(of[OURS]), peer, rate(of[mode]), ">= 1 x", check, unit="/s")
        spent = [times(percentiles(writes[each])) for each in (OURS, mode)]
        yield Row(f"writing a version, {size}", spent[0], peer, spent[1], "1 x", check)
