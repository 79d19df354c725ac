"""What can be published, and how it looks on the other side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(publisher, subscriber, dtype):
    raw = torch.randint(0, 2, (3, 5, dtype.itemsize), dtype=torch.uint8)
    source = raw.view(dtype).view(3, 5) if dtype is not torch.bool else raw.view(3, 5).bool()
    sub = subscriber(publisher({"t": source}))
    assert same(sub.weights["t"], source)
    assert sub.weights["t"].is_shared()


def test_dotted_keys_of_mappings_nest_and_those_of_tensordicts_stay(publisher, subscriber):
    assert subscriber(publisher({"a.b": torch.ones(1), "a.c": torch.ones(1)})).weights["a", "b"].item() == 1
    pub = publisher(TensorDict({"a.b": torch.ones(2), "n": {"m": torch.zeros(2)}}, batch_size=[]))
    pub.publish({"a.b": torch.full((2,), 7.0)})  # a dotted key finds the leaf of that name
    sub = subscriber(pub)
    assert sub.weights["a.b"].tolist() == [7, 7]
    assert sub.weights["n", "m"].tolist() == [0, 0]


@torch.no_grad()
def test_a_mapping_may_hold_modules_arrays_and_numbers(both):
    """A policy and the statistics of its observations. Each publish reads both; a worker binds the policy alone."""

    class Policy(nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.register_buffer("cache", torch.zeros(3), persistent=False)
            self.alias = self.weight

    def weights(value):
        nn.init.constant_(trainer.weight, value)
        counts = {
            "mean": np.full(2, float(value)),
            "count": np.int32(value),
            "rate": 0.1,
            "steps": value,
            "warm": False,
        }
        return {"policy": compiled, "observations": counts, "log_std": torch.full((2,), float(value))}

    trainer = Policy()
    compiled = torch.compile(trainer, backend="eager")
    pub, sub = both(weights(1), dtype=torch.bfloat16)
    worker = sub.bind(Policy().bfloat16(), prefix="policy")
    for value in (2, 3):
        pub.publish(weights(value))
        assert {name: (str(leaf.dtype)[6:], leaf.tolist()) for name, leaf in sub.state_dict().items()} == {
            "policy.weight": ("bfloat16", [[value] * 2]),
            "policy.alias": ("bfloat16", [[value] * 2]),
            "policy.bias": ("bfloat16", trainer.bias.bfloat16().tolist()),
            "observations.mean": ("float64", [value] * 2),
            "observations.count": ("int32", value),
            "observations.rate": ("float64", 0.1),
            "observations.steps": ("int64", value),
            "observations.warm": ("bool", False),
            "log_std": ("float32", [value] * 2),
        }
        assert torch.equal(worker(torch.ones(1, 2).bfloat16()), 2 * value + trainer.bias.bfloat16()[None])
    with pytest.raises(shmsync.ManifestMismatch, match=r"none\.weight is not in the arena[\s\S]*include="):
        sub.bind(nn.Linear(2, 1), prefix="none")


def test_include_and_exclude_choose_leaves_by_dotted_key(publisher, subscriber):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sub = subscriber(publisher(module, include="0.*", exclude=["*.bias"]))
    assert set(sub.weights.keys(True, True)) == {("0", "weight")}
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    private = other[1].weight.clone()
    sub.bind(other)
    assert torch.equal(other[0].weight, module[0].weight)
    assert torch.equal(other[1].weight, private)


@dataclass
class Meaning:
    scales: dict[str, torch.Tensor]


def quantised(value):
    """As some libraries make it: what the numbers mean hangs on the parameter."""
    module = nn.Module()
    module.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    module.codes.scale = value
    return module


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": torch.ones(1), "a.b": torch.ones(1)}, "both a tensor and the parent"),
        ({"a": "text"}, "not a tensor"),
        ({"a": 2**63}, "a is a int, not a tensor"),
        ({}, "no tensor to publish"),
        ({"a": {"": torch.ones(1)}}, "an empty part"),
        ({".".join("a" * 3000): torch.ones(1)}, "levels"),
        (nn.LazyLinear(3), "not initialised"),
        (quantised(torch.tensor(1.0)), "codes has torch.int8 values and the tensor 'scale' as an attribute"),
        (quantised(Meaning({"row": torch.tensor(1.0)})), "codes has torch.int8 values and the tensor 'scale'"),
    ],
    ids=["tree", "type", "large", "nothing", "empty", "deep", "lazy", "quantised", "dataclass"],
)
def test_what_cannot_be_published_is_refused_with_the_reason(weights, said):
    with pytest.raises(shmsync.ManifestMismatch, match=said):
        shmsync.Publisher(weights)


def test_one_tensor_under_two_names_of_a_mapping_is_one_warning():
    shared = torch.ones(2)
    with pytest.warns(UserWarning, match=r"'a' and 'b' are one tensor, and stay one") as warned:
        shmsync.Publisher({"a": shared, "b": shared, "c": shared, "d": torch.ones(2)}).close()
    assert len(warned) == 1


def test_other_objects_are_a_type_error():
    with pytest.raises(TypeError, match="mapping of dotted keys"):
        shmsync.Publisher([torch.ones(1)])
