"""What other sources than a module cost, and many leaves: each row beside its floor, in one run.

    make bench BENCH=sources                  every row
    make bench BENCH=sources ARGS="carry bind"  some of them

A row that is about leaves is printed in microseconds a leaf, at several numbers of leaves: equal figures are a straight
line. Rows alternate with their floor; the figures are medians. Each row checks the bytes that arrived.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import percentiles, rounds, timed
from tensordict import TensorDict
from torch import nn

import shmsync

torch.set_num_threads(1)

RESULTS: list[dict[str, Any]] = []
Pair = tuple[float, float]


def layers(leaves: int, side: int = 4) -> nn.Module:
    """Linear layers, two leaves each."""
    return nn.Sequential(*(nn.Linear(side, side) for _ in range(leaves // 2))).requires_grad_(False)


def show(work: str, ours: float | Pair, floor: float | Pair | None, aim: str, unit: str = "us") -> None:
    """One line of medians; seconds in, one time or the median and the 99th percentile, microseconds out."""
    (p50, p99), beside = _pair(ours), floor and _pair(floor)
    ratio = f"{p50 / beside[0]:8.2f}" if beside else ""
    RESULTS.append(
        {
            "work": work, "ours_us": p50 * 1e6, "ours_p99_us": p99 * 1e6, "floor_us": beside and beside[0] * 1e6,
            "floor_p99_us": beside and beside[1] * 1e6, "aim": aim, "unit": unit,
        }
    )  # fmt: skip
    other = f"{beside[0] * 1e6:11.1f}" if beside else ""
    print(f"{work:66} {p50 * 1e6:11.1f} {other:>11} {ratio:>8}  {unit:10} {aim}", flush=True)


def _pair(seconds: float | Pair) -> Pair:
    return seconds if isinstance(seconds, tuple) else (seconds, seconds)


def beside(work: str, ours: Callable[[], Any], floor: Callable[[], Any], aim: str, most: int = 30) -> None:
    """Two things that alternate."""
    for _ in range(3):
        ours(), floor()
    pairs = [(timed(ours), timed(floor)) for _ in rounds(most)]
    show(work, percentiles([a for a, _ in pairs]), percentiles([b for _, b in pairs]), aim)


def same(pub: shmsync.Publisher, state: dict[str, torch.Tensor]) -> bool:
    """Has the arena these values?"""
    return all(torch.equal(pub.weights.get(tuple(key.split("."))), value) for key, value in state.items())


def bind_rows() -> None:
    for leaves in LEAVES:
        module, other = layers(leaves), layers(leaves)
        made = []

        def publisher(module: nn.Module = module, made: list[Any] = made) -> None:
            made.append(shmsync.Publisher(module))

        show(f"Publisher(module), {leaves} leaves", timed(publisher) / leaves, None, "", "us a leaf")
        (pub,) = made
        made.clear()

        def attach(pub: shmsync.Publisher = pub, made: list[Any] = made) -> None:
            made.append(shmsync.Subscriber(pub.handle))

        show(f"Subscriber(handle), {leaves} leaves", timed(attach) / leaves, None, "", "us a leaf")
        (sub,) = made
        show(f"bind(), {leaves} leaves", timed(lambda sub=sub, other=other: sub.bind(other)) / leaves, None, "40 us",
             "us a leaf")  # fmt: skip
        assert all(map(torch.equal, other.parameters(), module.parameters())), "checksum"
        show(f"bind() again, {leaves} leaves", timed(lambda sub=sub, other=other: sub.bind(other)) / leaves, None,
             "40 us", "us a leaf")  # fmt: skip
        show(f"Subscriber.close(), {leaves} leaves", timed(sub.close) / leaves, None, "", "us a leaf")
        show(f"adopt(module), {leaves} leaves", timed(lambda pub=pub, m=module: pub.adopt(m)) / leaves, None, "",
             "us a leaf")  # fmt: skip
        show(f"Publisher.close(), {leaves} leaves", timed(pub.close) / leaves, None, "", "us a leaf")


def snapshot_rows() -> None:
    for leaves in LEAVES[:2]:
        module = layers(leaves)
        with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub:
            size = pub._writer.arena.manifest.used_bytes
            memory, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

            def floor(target: torch.Tensor = target, memory: torch.Tensor = memory, size: int = size) -> None:
                ctypes.memmove(target.data_ptr(), memory.data_ptr(), size)

            out = sub.snapshot().weights
            beside(f"snapshot(), {leaves} leaves / memcpy", sub.snapshot, floor, f"+ {3 * leaves} us", 7)
            beside(f"snapshot(out), {leaves} leaves / memcpy", lambda sub=sub, out=out: sub.snapshot(out), floor,
                   f"+ {3 * leaves} us", 7)  # fmt: skip
            module[3].weight.data.fill_(7)
            pub.publish()
            assert all(torch.equal(sub.snapshot(out).weights.get((*k.split("."),)), v)
                       for k, v in list(module.state_dict().items())[:20]), "checksum"  # fmt: skip


def dict_rows() -> None:
    module = nn.Sequential(*(nn.Linear(44, 44) for _ in range(100))).requires_grad_(False)
    fixed = dict(module.state_dict())
    kept = TensorDict.from_module(module)
    for dtype in (None, torch.bfloat16):
        suffix = "" if dtype is None else ", cast"
        with shmsync.Publisher(module, dtype=dtype) as pub:
            for name, make in (
                ("state_dict()", module.state_dict),
                ("a dict", lambda: fixed),
                ("{k: v.clone()}", lambda: {key: value.clone() for key, value in fixed.items()}),
                ("TensorDict.from_module(m)", lambda: TensorDict.from_module(module)),
                ("a TensorDict", lambda: kept),
            ):

                def floor(pub: shmsync.Publisher = pub, make: Callable[[], Any] = make) -> None:
                    make()
                    pub.publish(module)

                beside(f"publish({name}), 200 leaves{suffix} / make it + publish(module)",
                       lambda pub=pub, make=make: pub.publish(make()), floor, "1.5 x", 60)  # fmt: skip
                for parameter in module.parameters():
                    parameter.data.add_(1)
                pub.publish(make())
                want = module.state_dict() if name != "{k: v.clone()}" else fixed
                if dtype is not None:
                    want = {key: value.to(dtype) for key, value in want.items()}
                assert same(pub, want), "checksum"


def filter_rows() -> None:
    module = layers(5000)
    patterns = [f"{number}.weight" for number in range(50)]
    with shmsync.Publisher(module, exclude=patterns) as pub:
        state = dict(module.state_dict())
        beside("publish(dict), 5,000 leaves, exclude= of 50 / publish(module)", lambda: pub.publish(state),
               lambda: pub.publish(module), "matched once", 5)  # fmt: skip
    module = layers(5000)
    created = timed(lambda: shmsync.Publisher(module, exclude=patterns).close())
    show("Publisher(exclude= of 50), 5,000 leaves", created, None, "")


def carry_rows() -> None:
    for slots in (2, 3):
        base = {f"base.{number}": torch.rand(1 << 20) for number in range(96)}
        adapters = {f"adapter.{number}": torch.rand(8192) for number in range(96)}
        with shmsync.Publisher({**base, **adapters}, slots=slots) as pub:
            source = torch.rand(96 * 8192)
            target = torch.rand(96 * 8192)
            for _ in range(slots):
                pub.publish(adapters)
            floor = functools.partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), source.nbytes)
            ours = functools.partial(pub.publish, adapters)
            beside(f"publish(adapters), 3 of 387 MB, slots={slots} / memcpy", ours, floor, "what changed", 10)
            assert same(pub, {**base, **adapters}), "checksum"
        many = {f"leaf.{number}": torch.rand(16) for number in range(5000)}
        with shmsync.Publisher(many, slots=slots) as pub:
            one = {"leaf.7": torch.full((16,), 3.0)}
            for _ in range(slots):
                pub.publish(one)
            seconds = percentiles([timed(functools.partial(pub.publish, one)) for _ in rounds(20)])
            show(f"publish one leaf of 5,000, slots={slots}", seconds, None, "100 us")
            others = [{name: many[name]} for name in list(many)[:20]]
            seconds = percentiles([timed(functools.partial(pub.publish, other)) for other in others])
            show(f"publish another leaf of 5,000 each time, slots={slots}", seconds, None, "")
            assert same(pub, {**many, "leaf.7": many["leaf.7"]}), "checksum"


def small_rows() -> None:
    """Costs of 280 to 300 leaves that an earlier round had raised."""
    module = layers(280)
    weights = shmsync.WeightStrategy("state_dict")
    beside("extract_weights() to a state_dict, 280 leaves / state_dict()", lambda: weights.extract_weights(module),
           module.state_dict, "")  # fmt: skip
    show("Publisher(module), 280 leaves", statistics.median(_created(module) for _ in range(9)), None, "")
    with shmsync.Publisher(module) as pub:
        pub.adopt(module)
        seconds = percentiles([timed(pub.publish) for _ in rounds(99)])
        show("publish() of an adopted module, 280 leaves", seconds, None, "")
    with shmsync.Publisher(module, slots=2) as pub:
        show("a new mapping's weights, 280 leaves", statistics.median(_mapped(pub) for _ in range(9)), None, "")
        with shmsync.Subscriber(pub.handle) as sub:
            moves = []
            for _ in rounds(200):
                pub.publish()
                moves.append(timed(sub.refresh))
            show("applying a version without a module", percentiles(moves), None, "")


def _created(module: nn.Module) -> float:
    made: list[Any] = []
    seconds = timed(lambda: made.append(shmsync.Publisher(module)))
    made[0].close()
    return seconds


def _mapped(pub: shmsync.Publisher) -> float:
    with shmsync.Subscriber(pub.handle) as sub:
        return timed(lambda: sub.weights)


ROWS = {
    "bind": bind_rows, "snapshot": snapshot_rows, "dict": dict_rows, "filter": filter_rows, "carry": carry_rows,
    "small": small_rows,
}  # fmt: skip
LEAVES = (1000, 4000, 16000)


def main() -> None:
    global LEAVES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="default: all")
    parser.add_argument("--leaves", type=int, nargs="*", default=list(LEAVES))
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    LEAVES = tuple(arguments.leaves)
    print(f"{'work':66} {'ours':>11} {'floor':>11} {'ratio':>8}  {'unit':10} aim")
    for name in arguments.rows or ROWS:
        ROWS[name]()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sources.json").write_text(json.dumps(RESULTS, indent=2))


if __name__ == "__main__":
    main()
