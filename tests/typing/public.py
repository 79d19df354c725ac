"""What a type checker makes of the public names. Checked by `make types`; never run."""

from __future__ import annotations

from typing import assert_type

import torch
from tensordict import TensorDictBase
from torch import nn

import shmsync


def trainer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with shmsync.Publisher(module, slots=2, dtype=torch.bfloat16, include=["*.weight"]) as pub:
        assert_type(pub, shmsync.Publisher)
        assert_type(pub.publish(), int)
        assert_type(pub.publish({"weight": torch.zeros(2)}, wait="all", timeout=1.0), int)
        assert_type(pub.publish(wait=[0, 1]), int)
        with pub.update(wait="all") as weights:
            assert_type(weights, TensorDictBase)
        pub.adopt(module, optimizer)
        assert_type(pub.handle, shmsync.Handle)
        assert_type(pub.readers(), list[shmsync.ReaderInfo])
        assert_type(pub.readers()[0].state, shmsync.ProcessState)
        assert_type(pub.stats().publish, shmsync.Latency)
        pub.publish(wait="everyone")  # type: ignore[arg-type]
        pub.stats().version = 3  # type: ignore[misc]


def half(x: int) -> float:
    return x / 2


def worker(handle: shmsync.Handle, module: nn.Module) -> None:
    with shmsync.Subscriber(handle, consistency="optimistic", worker=0) as sub:
        assert_type(sub, shmsync.Subscriber)
        with sub.read(timeout=1.0) as section:
            assert_type(section, shmsync.ReadSection)
            assert_type(section.weights, TensorDictBase)
            assert_type((section.version, section.torn), tuple[int, bool])
        assert_type(sub.run(half, 2), float)
        assert_type(sub.snapshot(), shmsync.Snapshot)
        assert_type(sub.refresh(), bool)
        assert_type(sub.wait_version(2), int)
        assert_type(sub.bind(module), nn.Module)
        shmsync.attach(handle, consistency="eventual")  # type: ignore[arg-type]


def handler() -> list[int | str]:
    try:
        shmsync.attach("policy")
    except shmsync.AckTimeout as error:
        return error.missing
    return []
