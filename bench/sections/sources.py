"""Sources other than a module, many leaves, parts of the weights: each row beside its floor.

A row "for each leaf" is measured at several numbers of leaves: equal figures are a straight line.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from common.clock import Clock, Job
from common.measure import rounds, row, side_by_side, timed
from common.row import Row
from tensordict import TensorDict
from torch import nn

import shmsync

LEAVES = (1000, 4000)


def rows(clock: Clock, leaves: Iterable[int] = LEAVES, names: Iterable[str] = ()) -> Iterator[Row]:
    """Of these kinds of rows, or of all."""
    jobs = {
        "dict": Job(dict_rows, 10, "publish() of dicts and TensorDicts"),
        "carry": Job(carry_rows, 6, "publish() of a part of the weights"),
        "bind": Job(functools.partial(bind_rows, leaves), 14, "publishers, subscribers and bind() of many leaves"),
        "snapshot": Job(functools.partial(snapshot_rows, leaves), 4, "snapshot()"),
        "filter": Job(filter_rows, 2, "exclude="),
        "small": Job(small_rows, 5, "280 leaves"),
    }
    return clock.rows([jobs[name] for name in names or jobs])


def layers(leaves: int, side: int = 4) -> nn.Module:
    """Linear layers, two leaves each."""
    return nn.Sequential(*(nn.Linear(side, side) for _ in range(leaves // 2))).requires_grad_(False)


def same(pub: shmsync.Publisher, state: dict[str, torch.Tensor]) -> bool:
    """Has the arena these values?"""
    return all(torch.equal(pub.weights.get(tuple(key.split("."))), value) for key, value in state.items())


def bind_rows(numbers: Iterable[int]) -> Iterator[Row]:
    for leaves in numbers:
        module, other = layers(leaves), layers(leaves)
        made: list[Any] = []

        def cost(what: str, call: Callable[[], object], aim: str = "", leaves: int = leaves) -> Row:
            return row(f"{what}, {leaves} leaves, for each leaf", [timed(call) / leaves], aim=aim)

        yield cost("Publisher(module)", lambda made=made, module=module: made.append(shmsync.Publisher(module)))
        pub = made.pop()
        yield cost("Subscriber(handle)", lambda made=made, pub=pub: made.append(shmsync.Subscriber(pub.handle)))
        sub = made.pop()
        bind = functools.partial(sub.bind, other)
        yield cost("bind()", bind, "40 us")
        assert all(map(torch.equal, other.parameters(), module.parameters())), "checksum"
        yield cost("bind() again", bind, "40 us")
        yield cost("Subscriber.close()", sub.close)
        yield cost("adopt(module)", functools.partial(pub.adopt, module))
        yield cost("Publisher.close()", pub.close)


def snapshot_rows(numbers: Iterable[int]) -> Iterator[Row]:
    for leaves in list(numbers)[:2]:
        module = layers(leaves)
        with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub:
            size = pub._writer.arena.manifest.used_bytes
            memory, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
            floor = functools.partial(ctypes.memmove, target.data_ptr(), memory.data_ptr(), size)
            yield side_by_side(f"snapshot(), {leaves} leaves / memcpy", sub.snapshot, floor, 7, f"+ {3 * leaves} us")
            module[3].weight.data.fill_(7)
            pub.publish()
            assert all(torch.equal(sub.snapshot().weights.get((*k.split("."),)), v)
                       for k, v in list(module.state_dict().items())[:20]), "checksum"  # fmt: skip


def dict_rows() -> Iterator[Row]:
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

                what = f"publish({name}), 200 leaves{suffix} / make it + publish(module)"
                yield side_by_side(what, lambda pub=pub, make=make: pub.publish(make()), floor, 60, "1.5 x")
                for parameter in module.parameters():
                    parameter.data.add_(1)
                pub.publish(make())
                want = module.state_dict() if name != "{k: v.clone()}" else fixed
                if dtype is not None:
                    want = {key: value.to(dtype) for key, value in want.items()}
                assert same(pub, want), "checksum"


def filter_rows() -> Iterator[Row]:
    module = layers(5000)
    patterns = [f"{number}.weight" for number in range(50)]
    with shmsync.Publisher(module, exclude=patterns) as pub:
        state = dict(module.state_dict())
        what = "publish(dict), 5,000 leaves, exclude= of 50 / publish(module)"
        yield side_by_side(what, lambda: pub.publish(state), lambda: pub.publish(module), 5, "matched once")
    module = layers(5000)
    created = timed(lambda: shmsync.Publisher(module, exclude=patterns).close())
    yield row("Publisher(exclude= of 50), 5,000 leaves", [created])


def carry_rows() -> Iterator[Row]:
    for slots in (2, 3):
        base = {f"base.{number}": torch.rand(1 << 20) for number in range(96)}
        adapters = {f"adapter.{number}": torch.rand(8192) for number in range(96)}
        with shmsync.Publisher({**base, **adapters}, slots=slots) as pub:
            source, target = torch.rand(96 * 8192), torch.rand(96 * 8192)
            for _ in range(slots):
                pub.publish(adapters)
            floor = functools.partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), source.nbytes)
            what, ours = f"publish(adapters), 3 of 387 MB, slots={slots}", functools.partial(pub.publish, adapters)
            yield side_by_side(f"{what} / memcpy", ours, floor, 10, "what changed")
            assert same(pub, {**base, **adapters}), "checksum"
        many = {f"leaf.{number}": torch.rand(16) for number in range(5000)}
        with shmsync.Publisher(many, slots=slots) as pub:
            one = {"leaf.7": torch.full((16,), 3.0)}
            for _ in range(slots):
                pub.publish(one)
            seconds = [timed(functools.partial(pub.publish, one)) for _ in rounds(20)]
            yield row(f"publish one leaf of 5,000, slots={slots}", seconds, aim="100 us")
            others = [{name: many[name]} for name in list(many)[:20]]
            seconds = [timed(functools.partial(pub.publish, other)) for other in others]
            yield row(f"publish another leaf of 5,000 each time, slots={slots}", seconds)
            assert same(pub, {**many, "leaf.7": many["leaf.7"]}), "checksum"


def small_rows() -> Iterator[Row]:
    """Costs of 280 to 300 leaves that an earlier round had raised."""
    module = layers(280)
    weights = shmsync.WeightStrategy("state_dict")
    what = "extract_weights() to a state_dict, 280 leaves / state_dict()"
    yield side_by_side(what, lambda: weights.extract_weights(module), module.state_dict, 30, "")
    yield row("Publisher(module), 280 leaves", [_created(module) for _ in range(9)])
    with shmsync.Publisher(module) as pub:
        pub.adopt(module)
        yield row("publish() of an adopted module, 280 leaves", [timed(pub.publish) for _ in rounds(99)])
    with shmsync.Publisher(module, slots=2) as pub:
        yield row("a new mapping's weights, 280 leaves", [_mapped(pub) for _ in range(9)])
        with shmsync.Subscriber(pub.handle) as sub:
            moves = []
            for _ in rounds(200):
                pub.publish()
                moves.append(timed(sub.refresh))
            yield row("applying a version without a module", moves)


def _created(module: nn.Module) -> float:
    made: list[Any] = []
    seconds = timed(lambda: made.append(shmsync.Publisher(module)))
    made[0].close()
    return seconds


def _mapped(pub: shmsync.Publisher) -> float:
    with shmsync.Subscriber(pub.handle) as sub:
        return timed(lambda: sub.weights)
