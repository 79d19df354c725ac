"""dtype=: one dtype or a mapping of patterns, what it costs, and what is refused."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from shmsync import ManifestMismatch
from shmsync.engine.copy.converting import STAGED_BYTES
from shmsync.engine.source.cast_before_send import cast_weights
from support.choice import first

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


def test_a_leaf_that_no_pattern_casts_takes_its_own_dtype_only(publisher, subscriber):
    pub = publisher(Rotary(), dtype={"proj.*": BF16})
    with pytest.raises(ManifestMismatch, match=r"inv_freq is torch.float32 in the arena but torch.float64"):
        pub.publish({"proj.bias": torch.zeros(2, dtype=F64), "inv_freq": torch.zeros(2, dtype=F64)})
    worker = Rotary(BF16)  # its norm is bfloat16, the arena's is not
    with pytest.raises(ManifestMismatch) as refused:
        subscriber(pub).bind(worker)
    assert "4 difference(s)" in str(refused.value) and "proj" not in str(refused.value)


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


@pytest.mark.parametrize("form", PLAIN)
def test_where_nothing_tells_parameters_all_floating_leaves_are_cast(publisher, form):
    pub = publisher(PLAIN[form](Language()), dtype=BF16)
    assert set(buffers_of(pub).values()) == {BF16}
    for again in (FORMS | PLAIN).values():
        pub.publish(again(Language()))


def test_an_instance_of_buffer_is_known_by_its_type(publisher):
    pub = publisher({"w": torch.zeros(2), "table": nn.Buffer(torch.zeros(2))}, dtype=BF16)
    assert dtypes_of(pub) == {"w": BF16, "table": F32}


@pytest.mark.parametrize("form", [dict, lambda leaves: TensorDict(leaves)], ids=["dict", "tensordict"])
def test_weights_that_a_scheme_casts_keep_their_instances_of_buffer(form):
    cast = cast_weights(form({"w": torch.zeros(2), "table": nn.Buffer(torch.zeros(2))}), BF16, partial=False)
    assert (cast["w"].dtype, cast["table"].dtype) == (BF16, F32)


def test_a_filter_does_not_change_what_is_a_parameter(publisher):
    pub = publisher(TensorDict.from_module(Language()), dtype=BF16, include=["inv_freq", "norm.running_*"])
    assert set(dtypes_of(pub).values()) == {F32}


def test_a_buffer_that_is_one_tensor_with_a_parameter_is_cast_with_it(publisher, subscriber):
    def make():
        module = nn.Linear(2, 2)
        module.register_buffer("seen", module.weight.data)
        return module

    pub = publisher(make(), dtype=BF16)
    assert dtypes_of(pub) == {"weight": BF16, "bias": BF16, "seen": BF16}
    subscriber(pub).bind(make().to(BF16))


WORKERS = {
    "all of it": lambda: Language().to(BF16),
    "parameters": lambda: Language(BF16),
    "nothing": Language,
    "one layer": lambda: Language().apply(lambda each: each.to(F16) if isinstance(each, nn.BatchNorm1d) else each),
    "one tensor": lambda: Language().apply(lambda each: setattr(each, "bias", halved(each)) or each),
}


def halved(module):
    return None if getattr(module, "bias", None) is None else nn.Parameter(module.bias.detach().to(F64))


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("dtype", [None, BF16, F16], ids=str)
def test_the_error_prints_the_mapping_that_cures_it(publisher, subscriber, worker, dtype):
    make = WORKERS[worker]
    pub = publisher(Language(), dtype=dtype)
    try:
        subscriber(pub).bind(make())
    except ManifestMismatch as error:
        cure = eval(re.search(r"dtype=(\{.*?\})\)", str(error))[1], {"torch": torch})
        subscriber(publisher(Language(), dtype=cure)).bind(make())
    else:
        assert (worker, dtype) in [("nothing", None), ("parameters", BF16)]


WRONG = [
    ({"dtype": {"head.*": BF16, "proj.*": BF16}}, ManifestMismatch, r"'head\.\*' of dtype= matches no leaf"),
    ({"dtype": {"*.num_batches_tracked": BF16}}, ManifestMismatch, "matches only leaves that are not floating"),
    ({"dtype": {"*": BF16, "inv_freq": F32}}, ManifestMismatch, "'inv_freq' of dtype= comes too late.*put it first"),
    ({"dtype": {"inv_freq": F32}, "exclude": "inv_*"}, ManifestMismatch, "'inv_freq' of dtype= matches no leaf"),
    ({"include": ["proj.*", "head.*"]}, ManifestMismatch, r"'head\.\*' of include= matches no leaf"),
    ({"exclude": ["*.bias", "*.bais"]}, ManifestMismatch, r"'\*\.bais' of exclude= matches no leaf"),
    (
        {"include": "x", "exclude": "y"},
        ManifestMismatch,
        "'x' of include= matches no leaf.*'y' of exclude= matches no leaf",
    ),
    ({"dtype": "bfloat16"}, TypeError, "not 'bfloat16' of type str"),
    ({"dtype": float}, TypeError, "torch.bfloat16"),
    ({"dtype": [BF16]}, TypeError, "glob patterns to such dtypes"),
    ({"dtype": {"*": "bfloat16"}}, TypeError, r"has '\*': 'bfloat16'"),
    ({"dtype": {1: BF16}}, TypeError, "has 1: torch.bfloat16"),
    ({"dtype": torch.int8}, ValueError, "must be floating itself, not torch.int8"),
    ({"dtype": {"*": torch.int8}}, ValueError, "must be floating itself, not torch.int8"),
    ({"dtype": torch.complex64}, ValueError, "not torch.complex64"),
    ({"include": 3}, TypeError, "include= is a glob pattern or a list of them, not 3"),
    ({"exclude": ["a", 3]}, TypeError, "exclude= is a glob pattern or a list of them, but it has"),
]


@pytest.mark.parametrize(("options", "kind", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_a_pattern_or_dtype_that_will_not_do_is_an_error_that_names_it(options, kind, said):
    with pytest.raises(kind, match=said):
        shmsync.Publisher(Rotary(), **options)


def test_one_tensor_cannot_get_two_dtypes():
    tied = torch.ones(3)
    with pytest.raises(ManifestMismatch, match="a and b are one tensor, but dtype= makes them"):
        shmsync.Publisher({"a": tied, "b": tied}, dtype={"a": BF16})


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("size", [4, STAGED_BYTES // 2 + 4])
def test_converted_bytes_are_right_and_counted_once(publisher, slots, size):
    """Small and large: with slots=1 the small ones are converted before readers are kept out."""
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


@pytest.mark.parametrize("slots", [1, 2])
def test_a_conversion_that_fails_is_undone(both, slots, monkeypatch):
    """As any failure in the middle of a write: slots=1 is poisoned until a full publish(), else the version stays."""
    source = {"a": torch.ones(STAGED_BYTES), "b": torch.ones(4)}
    pub, sub = both(source, slots=slots, dtype=BF16)
    source["a"] += 1
    pub.publish()
    views = pub._writer.arena.views(0 if slots == 1 else pub._writer.side.writer.current_slot ^ 1, writable=True)
    with monkeypatch.context() as patch:
        patch.setitem(views, ("b",), torch.empty(3))  # a real copy_() that cannot be done
        with pytest.raises(RuntimeError, match="size of tensor"):
            pub.publish()
    if slots == 1:
        with pytest.raises(shmsync.Poisoned), sub.read(timeout=0.05):
            pass
    else:
        assert pub.version == 2
        assert sub.snapshot().weights["a"][0].item() == 2
    pub.publish()
    sub.refresh()
    assert sub.snapshot().weights["b"].tolist() == [1] * 4


MEASURE = """
    import re, sys, torch, shmsync

    torch.set_num_threads(1)

    def status(word):
        return int(re.search(rf"{word}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

    slots, kind, count, words = int(sys.argv[1]), sys.argv[2], 24, 1 << 20
    make = {
        "cast": lambda: torch.ones(words),
        "strided": lambda: torch.ones(words // 1024, 1024).t(),
        "device": lambda: torch.ones(words // 1024, 1024).t(),
    }[kind]
    source = {f"leaf.{i}": make() for i in range(count)}
    shmsync.Publisher({"t": torch.ones(4)}, dtype=torch.bfloat16).close()  # what is loaded and mapped the first time
    open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
    before = status("VmRSS")
    options = {"dtype": torch.bfloat16} if kind == "cast" else {"device": "cpu"} if kind == "device" else {}
    pub = shmsync.Publisher(source, slots=slots, **options)
    for _ in range(3):
        pub.publish()
    leaf = pub._writer.arena.manifest.leaves[0].nbytes
    print(status("VmHWM") - before, pub._writer.arena.manifest.slot_bytes, leaf)
    pub.close()
"""


@pytest.mark.parametrize("kind", first(["cast", "strided", "device"]))
@pytest.mark.parametrize("slots", [1, 2])
def test_converting_needs_no_second_copy_of_the_weights(slots, kind):
    program = [sys.executable, "-c", textwrap.dedent(MEASURE), str(slots), kind]
    run = subprocess.run(program, capture_output=True, text=True, check=True, cwd="/")
    peak, slot_bytes, leaf = map(int, run.stdout.split())
    noise = 6 << 20  # of Python and the allocator; a private copy of the slot would be 48 or 96 MiB
    assert peak <= slots * slot_bytes + leaf + noise, f"{peak:,} bytes for {slots} slots of {slot_bytes:,}"
    print(f"\npeak {peak:,}, slots x bytes {slots * slot_bytes:,}, largest leaf {leaf:,}")
