"""Frames per second of MultiprocessCollector beside TorchRL's collectors, with a sync of the weights after every batch.

    python bench/collectors.py --workers 4 --frames 20000 --rounds 3
    python bench/collectors.py --gymnasium [--quick] [--only CartPole]    # beside Gymnasium's own loops instead

CartPole-v1, the same policy, workers and batches; the contestants take turns, so that a slow moment of the machine
hits all. Every frame is checked: a policy whose weights all hold the number of their update says which it used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import torch
from measure import percentiles
from tensordict.nn import TensorDictModule
from torch import nn
from vector_envs import table


class Net(nn.Module):
    """An MLP that acts at random, and whose `echo` shows which weights it used, and whether they were torn."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.echo = nn.Parameter(torch.zeros(100_000))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.mlp(observation)
        action = torch.distributions.Categorical(logits=logits).sample()
        low, high = torch.aminmax(self.echo)
        ones = torch.ones(action.shape)
        return action, low * ones, high * ones


def policy() -> TensorDictModule:
    return TensorDictModule(Net(), in_keys=["observation"], out_keys=["action", "low", "high"])


def gym_env() -> Any:
    return gymnasium.make("CartPole-v1")


def torchrl_env() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@contextmanager
def ours(module: TensorDictModule, options: argparse.Namespace, sync: bool, vectors: int = 1) -> Iterator[Any]:
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
def torchrls(module: TensorDictModule, options: argparse.Namespace, sync: bool, scheme: str) -> Iterator[Any]:
    from torchrl import collectors, weight_update

    kind = collectors.MultiSyncCollector if sync else collectors.MultiAsyncCollector
    collector = kind(
        create_env_fn=[torchrl_env] * options.workers,
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


def run(make: Callable[..., Any], options: argparse.Namespace, *args: Any) -> dict[str, float]:
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
        "sync_share": sum(updates[1:]) / elapsed,
        "sync_p50_us": p50 * 1e6,
        "sync_p99_us": p99 * 1e6,
        "torn": torn,
        "wrong_version": wrong,
        "frames": frames,
    }


def contestants(options: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    schemes = ("SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme")
    found: dict[str, tuple[Any, ...]] = {}
    for sync, name in ((True, "sync"), (False, "async")):
        found[f"{name}: shmsync"] = (ours, sync)
        for scheme in schemes:
            found[f"{name}: TorchRL Multi{name.title()}Collector, {scheme.removesuffix('WeightSyncScheme')}"] = (
                torchrls,
                sync,
                scheme,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=400)
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gymnasium", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.gymnasium:
        found = table(options.rounds, options.quick, options.only)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "vector_envs.md").write_text(found + "\n")
        return
    names = contestants(options)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, (make, *args) in names.items():
            results[name].append(run(make, options, *args))
            last = results[name][-1]
            print(f"{name:62} {last['frames_per_s']:8.0f} frames/s", flush=True)
    print()
    lines = [
        "| collector | frames/s | ratio to shmsync | sync p50 / p99, µs | time in sync | torn | wrong version |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, passes in results.items():
        middle = {key: statistics.median(each[key] for each in passes) for key in passes[0]}
        base = statistics.median(each["frames_per_s"] for each in results[f"{name.split(':')[0]}: shmsync"])
        total = {key: int(sum(each[key] for each in passes)) for key in ("torn", "wrong_version", "frames")}
        lines.append(
            f"| {name} | {middle['frames_per_s']:,.0f} | {middle['frames_per_s'] / base:.2f} | "
            f"{middle['sync_p50_us']:,.0f} / {middle['sync_p99_us']:,.0f} | {middle['sync_share']:.1%} | "
            f"{total['torn']} of {total['frames']:,} | {total['wrong_version']} |"
        )
    print("\n".join(lines))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "collectors.md").write_text("\n".join(lines) + "\n")
        (options.out / "collectors.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
