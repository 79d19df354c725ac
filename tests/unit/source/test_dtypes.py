"""dtype=: one dtype or a mapping of patterns, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from shmsync import ManifestMismatch

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Rotary(nn.Module):
    def __init__(self, dtype=F32):
        super().__init__()
        self.proj = nn.Linear(2, 2).to(dtype)
        self.norm = nn.BatchNorm1d(2).to(dtype)
        self.register_buffer("inv_freq", torch.tensor([1.0 + 2**-12, 3.0]))


def dtypes_of(pub):
    return {".".join(k) if isinstance(k, tuple) else k: v.dtype for k, v in pub.weights.items(True, True)}


def test_the_first_pattern_that_matches_counts_and_the_rest_is_left(publisher):
    pub = publisher(Rotary(), dtype={"proj.bias": F16, "proj.*": BF16, "norm.running_*": F64})
    assert dtypes_of(pub) == {
        "proj.weight": BF16,
        "proj.bias": F16,
        "norm.weight": F32,
        "norm.bias": F32,
        "norm.running_mean": F64,
        "norm.running_var": F64,
        "norm.num_batches_tracked": torch.int64,
        "inv_freq": F32,
    }
    pub.publish({"proj.weight": torch.full((2, 2), 2.0, dtype=F64)})  # any floating dtype is cast
    assert pub.weights["proj", "weight"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    pub = publisher(Rotary(), dtype={"inv_freq": F32})
    pub.publish({"inv_freq": torch.zeros(2, dtype=F64)})  # to the dtype that it had, too
    assert pub.weights["inv_freq"].tolist() == [0.0, 0.0]


class Language(nn.Module):
    """Parameters, tied ones too, and buffers, one of them of whole numbers."""

    def __init__(self, dtype=F32):
        super().__init__()
        self.emb, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.emb.weight
        self.norm = nn.BatchNorm1d(2)
        for parameter in self.parameters():  # as from_config(dtype=) makes it: buffers are computed in float32
            parameter.data = parameter.data.to(dtype)
        self.register_buffer("inv_freq", torch.tensor([1.0 + 2**-12, 3.0]))

    def forward(self, tokens, position):
        angle = (position * self.inv_freq).sum()
        return self.head(self.emb(tokens) * torch.cos(angle).to(self.emb.weight.dtype))


def data(module):
    return TensorDict.from_module(module).data


FORMS = {
    "module": lambda module: module,
    "tensordict": TensorDict.from_module,
    "parameters by name": lambda module: {
        **dict(module.named_parameters(remove_duplicate=False)),
        **module._buffers,
        **{f"norm.{name}": each for name, each in module.norm._buffers.items()},
    },
    "state_dict with parameters": lambda module: module.state_dict(keep_vars=True),
    "nested dict": lambda module: TensorDict.from_module(module).to_dict(),
}
PLAIN = {
    "state_dict": lambda module: module.state_dict(),
    "tensordict without parameters": data,
    "strings to tensors": lambda module: {name: tensor.clone() for name, tensor in module.state_dict().items()},
}


def buffers_of(pub):
    return {name: kind for name, kind in dtypes_of(pub).items() if "inv_freq" in name or "running" in name}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_one_dtype_casts_parameters_and_buffers_keep_theirs(publisher, subscriber, form, slots):
    """What a worker computes is what the trainer's own cast computes, rotary angles at large positions too."""
    trainer = Language()
    pub = publisher(FORMS[form](trainer), slots=slots, dtype=BF16)
    assert set(buffers_of(pub).values()) == {F32}
    assert dtypes_of(pub)["emb.weight"] == dtypes_of(pub)["norm.weight"] == BF16
    worker = Language(BF16)
    subscriber(pub).bind(worker)
    expected = copy.deepcopy(trainer)
    for parameter in expected.parameters():
        parameter.data = parameter.data.to(BF16)
    tokens = torch.arange(3)
    assert all(torch.equal(worker(tokens, at), expected(tokens, at)) for at in (0, 100, 2000, 99999))
    rounded = copy.deepcopy(trainer).to(BF16)  # what casting the table as well computes
    assert not all(torch.equal(worker(tokens, at), rounded(tokens, at)) for at in (0, 100, 2000, 99999))
    for again in (FORMS | PLAIN).values():  # any form of it is a later version
        with torch.no_grad():
            trainer.emb.weight.add_(1)
        pub.publish(again(trainer))
        assert torch.equal(pub.weights["head", "weight"], trainer.emb.weight.bfloat16())
        assert pub.weights["inv_freq"][0] == 1 + 2**-12


WRONG = [
    ({"dtype": {"head.*": BF16, "proj.*": BF16}}, ManifestMismatch, r"'head\.\*' of dtype= casts nothing"),
    ({"dtype": {"*.num_batches_tracked": BF16}}, ManifestMismatch, "casts nothing"),
    ({"dtype": {"*": BF16, "inv_freq": F32}}, ManifestMismatch, "'inv_freq' of dtype= casts nothing.*put it first"),
    ({"include": ["proj.*", "head.*"]}, ManifestMismatch, r"'head\.\*' of include= matches no leaf"),
    ({"exclude": ["*.bias", "*.bais"]}, ManifestMismatch, r"'\*\.bais' of exclude= matches no leaf"),
    ({"dtype": "bfloat16"}, TypeError, "not 'bfloat16' of type str"),
    ({"dtype": torch.int8}, ValueError, "must be floating itself, not torch.int8"),
    ({"include": 3}, TypeError, "include= is a glob pattern or a list of them, not 3"),
]


@pytest.mark.parametrize(("options", "kind", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_a_pattern_or_dtype_that_will_not_do_is_an_error_that_names_it(options, kind, said):
    with pytest.raises(kind, match=said):
        shmsync.Publisher(Rotary(), **options)


@pytest.mark.parametrize("slots", [1, 2])
def test_converted_bytes_are_right_and_counted_once(publisher, slots):
    size = 4
    source = {"t": torch.arange(float(size)) % 251, "strided": torch.arange(8.0).view(2, 4).t(), "n": torch.arange(3)}
    pub = publisher(source, slots=slots, dtype=BF16)
    before = pub.stats().bytes_copied
    for added in (1, 2):
        source["t"] += 1
        source["strided"] += 1
        pub.publish()
        assert torch.equal(pub.weights["t"], ((torch.arange(float(size)) % 251) + added).bfloat16())
        assert torch.equal(pub.weights["strided"], (torch.arange(8.0).view(2, 4).t() + added).bfloat16())
    assert pub.stats().bytes_copied - before == 2 * (2 * size + 16 + 24)
