"""MultiprocessCollector beside TorchRL's collectors, with an update of the weights after every batch.

CartPole-v1, the same policy, workers and batches; the contestants take turns, so that a slow moment of the machine
hits all. Every frame is checked: a policy whose weights all hold the number of their update says which it used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import torch
from common.clock import Clock
from common.environment import installed
from common.measure import percentiles, rate
from common.row import MISSING, OK, Row
from tensordict.nn import TensorDictModule
from torchrl_scheme.policies import Net, make_env, mlp

SCHEME = "SharedMemWeightSyncScheme"


class Options(NamedTuple):
    workers: int = 4
    batch: int = 400
    frames: int = 4000


def rows(clock: Clock) -> Iterator[Row]:
    schemes = (SCHEME,) if installed("torchrl") else ()
    if not schemes:
        yield Row("TorchRL's collectors", trouble=f"{MISSING}: torchrl")

    def measure(sync: str) -> Iterator[Row]:
        options = Options(frames=4000 if clock.left > 10 else 1200)
        return beside(sync, options, schemes, lambda passes: passes == 3 or clock.left <= 15)

    yield from clock.cells({f"the {sync} collector": (sync,) for sync in ("sync", "async")}, 15, measure)


def beside(sync: str, options: Options, schemes: tuple[str, ...], enough: Callable[[int], bool]) -> Iterator[Row]:
    """Passes of ours and of TorchRL's collector with each of its schemes, until there are enough."""
    names: dict[str, Any] = {"": partial(run, ours, options, sync == "sync")}
    for scheme in schemes:
        peer = f"TorchRL Multi{sync.title()}Collector"
        name = peer if scheme == SCHEME else f"{peer}, {scheme.removesuffix('WeightSyncScheme')}"
        names[name] = partial(run, torchrls, options, sync == "sync", scheme)
    passes: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    while not passes[""] or not enough(len(passes[""])):
        for name, once in names.items():
            passes[name].append(once())
    mine = passes.pop("")
    wrong = {key: int(sum(each[key] for each in mine)) for key in ("torn", "wrong_version")}
    check = OK if not any(wrong.values()) else f"WRONG: {wrong}"
    where = f"CartPole, {options.workers} workers, {sync}"
    for name, theirs in passes.items() or [(f"TorchRL Multi{sync.title()}Collector", [])]:
        yield Row(f"frames, {where}, weights after every batch", _speeds(mine), name, _speeds(theirs), ">= 1 x", check,
                  unit="/s")  # fmt: skip
        yield Row(f"update of the weights, {where}", _updates(mine), name, _updates(theirs), "1 x", check)


def _speeds(found: list[dict[str, float]]) -> Any:
    return rate(each["frames_per_s"] for each in found) if found else None


def _updates(found: list[dict[str, float]]) -> Any:
    if not found:
        return None
    middle = sorted(found, key=lambda each: each["sync_p50_us"])[len(found) // 2]
    return middle["sync_p50_us"], max(each["sync_p99_us"] for each in found)


def policy() -> TensorDictModule:
    """An MLP that acts at random, and shows which weights it used, and whether they were torn."""
    return TensorDictModule(Net(mlp(), echo=True), ["observation"], ["action", "low", "high", "seconds"])


def gym_env() -> Any:
    return gymnasium.make("CartPole-v1")


@contextmanager
def ours(module: TensorDictModule, options: Options, sync: bool, vectors: int = 1) -> Iterator[Any]:
    from shmsync.collectors import MultiprocessCollector

    with MultiprocessCollector(
        gym_env,
        module,
        num_workers=options.workers,
        frames_per_batch=options.batch,
        total_frames=options.frames,
        sync=sync,
        envs_per_worker=vectors,
        start_method="spawn",
    ) as collector:
        yield collector


@contextmanager
def torchrls(module: TensorDictModule, options: Options, sync: bool, scheme: str) -> Iterator[Any]:
    from torchrl import collectors, weight_update

    kind = collectors.MultiSyncCollector if sync else collectors.MultiAsyncCollector
    collector = kind(
        create_env_fn=[make_env] * options.workers,
        policy=module,
        frames_per_batch=options.batch,
        total_frames=options.frames,
        weight_sync_schemes={"policy": getattr(weight_update, scheme)()},
        track_policy_version=True,
        **({"cat_results": "stack"} if sync else {}),
    )
    try:
        yield collector
    finally:
        collector.shutdown()


def run(make: Callable[..., Any], options: Options, *args: Any) -> dict[str, float]:
    """One pass; the first batch, which the start is part of, does not count."""
    module = policy()
    echo = module.module.echo
    frames = torn = 0
    updates: list[float] = []
    offsets: Counter[float] = Counter()
    with make(module, options, *args) as collector:
        start = 0.0
        for count, batch in enumerate(collector):
            if count == 0:
                start = time.perf_counter()
            else:
                frames += batch.numel()
                low, high = batch["low"].reshape(-1), batch["high"].reshape(-1)
                torn += int((low != high).sum())
                version = batch["policy_version"].reshape(-1).double()
                offsets.update((version - low)[low == high].tolist())
            with torch.no_grad():
                echo.add_(1.0)
            began = time.perf_counter()
            collector.update_policy_weights_()
            updates.append(time.perf_counter() - began)
        elapsed = time.perf_counter() - start
    whole = sum(offsets.values())
    wrong = whole - offsets.most_common(1)[0][1]
    p50, p99 = percentiles(updates[1:])
    return {
        "frames_per_s": frames / elapsed,
        "sync_p50_us": p50 * 1e6,
        "sync_p99_us": p99 * 1e6,
        "torn": torn,
        "wrong_version": wrong,
    }
