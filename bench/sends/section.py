"""A synchronous send of shmsync's schemes beside a ping-pong with a memcpy, and beside TorchRL's schemes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from common.clock import Clock
from common.environment import environment, installed
from common.measure import percentiles
from common.row import FAILED, MISSING, OK, Pair, Row, times
from common.trainer import Trainer

from sends.contest import CONTEXT, Contestant, trainer

OURS, PIPE = "shmsync SharedMem", "shmsync MultiProcess"
TORCHRL, TORCHRL_ALIAS = "TorchRL SharedMem", "TorchRL SharedMem, alias"
TORCHRL_PIPE, TORCHRL_PIPE_ALIAS = "TorchRL MultiProcess", "TorchRL MultiProcess, alias"
QUEUES, RAY = "a queue for each worker", "Ray's object store"  # of the README's chart
FLOOR = "ping-pong + memcpy"
CONTESTANTS = {
    FLOOR: "baselines.ping_pong:PingPongAndCopy",
    OURS: "sends.shmsync_sessions:SharedMem",
    TORCHRL: "baselines.torchrl_schemes:SharedMem",
    PIPE: "sends.shmsync_sessions:MultiProcess",
    TORCHRL_PIPE: "baselines.torchrl_schemes:MultiProcess",
    TORCHRL_PIPE_ALIAS: "baselines.torchrl_schemes:MultiProcessAlias",
    TORCHRL_ALIAS: "baselines.torchrl_schemes:SharedMemAlias",
    QUEUES: "baselines.queues:Queues",
    RAY: "baselines.ray_store:RayStore",
}
FLOORS = ((OURS, FLOOR),)
PEERS = (
    (OURS, TORCHRL), (OURS, TORCHRL_ALIAS), (PIPE, TORCHRL_PIPE), (PIPE, TORCHRL_PIPE_ALIAS),
    (OURS, QUEUES), (OURS, RAY),
)  # fmt: skip
TURN = 0.05  # seconds

SMALL, MANY, LARGE = "5k parameters, 6 tensors", "5k parameters, 200 tensors", "25M parameters, 6 tensors"
CELLS = [  # the most telling first: the time may not be enough for all
    *((size, 4) for size in (MANY, LARGE, SMALL, "1M parameters, 6 tensors", "1.6 MB, 200 tensors")),
    (MANY, 1), (SMALL, 8), (MANY, 8), (LARGE, 1), (SMALL, 1), (SMALL, 2), (LARGE, 8), (MANY, 2),
]  # fmt: skip


def rows(clock: Clock) -> Iterator[Row]:
    names = [FLOOR, OURS, PIPE]
    if installed("torchrl"):
        names += [TORCHRL, TORCHRL_PIPE, QUEUES]
    else:
        yield Row("TorchRL's schemes", trouble=f"{MISSING}: torchrl")
    if installed("ray"):
        names.append(RAY)
    with contestants_of(names, patience=max(120.0, clock.left)) as contestants:

        def measure(size: str, workers: int) -> Iterator[Row]:
            seconds = min(4.0, clock.left / len(CELLS) / 2)
            # Queues and Ray's store take part in the first cell only: it is the README's chart.
            invited = [each for each in contestants if each.name not in (QUEUES, RAY) or (size, workers) == CELLS[0]]
            return cell(invited, size, workers, seconds)

        yield from clock.cells({f"send, {place(*each)}": each for each in CELLS}, 8, measure)


class Sends(NamedTuple):
    """What a contestant did in one cell."""

    samples: list[float]
    check: str
    trouble: str | None

    @property
    def times(self) -> Pair:
        return times(percentiles(self.samples))


@contextmanager
def contestants_of(names: list[str], patience: float) -> Iterator[list[Contestant]]:
    """The contestants with these names, whose trainers end with it."""
    kinds = {name: CONTESTANTS[name].partition(":") for name in names}
    modules = sorted({module for module, _, _ in kinds.values()})
    with environment():
        CONTEXT.set_forkserver_preload(modules)
        companies = {module: Trainer(CONTEXT, trainer, module) for module in modules}
        try:
            for company in companies.values():
                company.answer(None)
            yield [Contestant(name, kind, companies[module], patience) for name, (module, _, kind) in kinds.items()]
        finally:
            for company in companies.values():
                company.stop()


def cell(contestants: list[Contestant], size: str, workers: int, seconds: float) -> Iterator[Row]:
    """The contestants' sends of one size, in turns; a slow moment of the machine hits all."""
    samples: dict[str, list[float]] = {each.name: [] for each in contestants}
    for each in contestants:
        each.open(size, workers)
    end, turns = time.monotonic() + seconds, 0
    while (turns < 3 or time.monotonic() < end) and any(each.trouble is None for each in contestants):
        for each in contestants:
            samples[each.name] += each.turn(TURN)
        turns += 1
    found = {each.name: Sends(samples[each.name], each.check(), each.trouble) for each in contestants}
    for each in contestants:
        each.close()
    for company in {each.company for each in contestants if each.company.trouble is not None}:
        company.start()
        company.answer(None)
    for each in contestants:
        each.trouble = None
    aim = "3 x" if "200" in size else "2 x"
    pairs = [(ours, theirs) for ours, theirs in (*FLOORS, *PEERS) if ours in found and theirs in found]
    for ours, theirs in pairs:
        what = f"{ours.removeprefix('shmsync ')}, {place(size, workers)}"
        yield beside(what, found[ours], theirs, found[theirs], aim if (ours, theirs) in FLOORS else "1 x")
    for name, each in found.items():
        if any(name in pair for pair in pairs):
            continue  # else there is nothing to compare it with
        what = f"{name}, {place(size, workers)}"
        yield Row(what, each.times, check=check(each)) if each.trouble is None else Row(what, trouble=each.trouble)


def place(size: str, workers: int) -> str:
    return f"{size}, {workers} worker{'s' if workers > 1 else ''}"


def beside(what: str, ours: Sends, name: str, theirs: Sends, aim: str) -> Row:
    if ours.trouble is not None:
        return Row(what, floor=name, aim=aim, trouble=f"{FAILED}: {ours.trouble}")
    if theirs.trouble is not None:  # a peer's own
        return Row(what, ours.times, f"{name}: {theirs.trouble}", None, aim, check(ours))
    return Row(what, ours.times, name, theirs.times, aim, check(ours, theirs))


def check(*found: Sends) -> str:
    wrong = [each.check for each in found if each.check != "ok"]
    return f"WRONG: {'; '.join(wrong)}" if wrong else OK
