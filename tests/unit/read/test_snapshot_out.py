"""snapshot(out=): which memory it takes, and that nothing is written into what it refuses."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import nn

import shmsync


def read_only(arenas):
    return arenas.subscriber(arenas.publisher({"x": torch.zeros(4)})).weights["x"]


PLAIN = {"a": torch.float32, "b": torch.float32, "c": torch.complex64}
BAD = {
    "expanded": (lambda arenas: {"b": torch.zeros(1).expand(4)}, "b of out has several elements in one place"),
    "conjugated": (lambda arenas: {"c": torch.zeros(4, dtype=torch.complex64).conj()}, "c of out is lazily conjugated"),
    "negated": (lambda arenas: {"b": torch.zeros(4, dtype=torch.complex64).conj().imag}, "lazily .*negated"),
    "another arena's": (lambda arenas: {"b": read_only(arenas)}, "b of out lies in an arena, which is read-only"),
    "missing": (lambda arenas: {"b": None}, "b of out is missing"),
    "no tensor": (
        lambda arenas: {"b": TensorDict({"deep": torch.zeros(4)}, batch_size=[])},
        "b of out is missing",
    ),
    "dtype": (lambda arenas: {"b": torch.zeros(4, dtype=torch.float64)}, "torch.float64"),
    "shape": (lambda arenas: {"b": torch.zeros(5)}, r"\(5,\)"),
}


def out_with(**others):
    made = {name: torch.zeros(4, dtype=dtype) for name, dtype in PLAIN.items()} | others
    return TensorDict({name: leaf for name, leaf in made.items() if leaf is not None}, batch_size=[])


@pytest.fixture
def sub(publisher, subscriber):
    return subscriber(publisher({name: torch.ones(4, dtype=dtype) for name, dtype in PLAIN.items()}))


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(arenas, sub, kind):
    make, said = BAD[kind]
    out = out_with(**make(arenas))
    with pytest.raises(ValueError, match=f"nothing was written.*{said}"):
        sub.snapshot(out)
    assert out["a"].tolist() == [0] * 4


def test_elements_that_overlap_are_refused(publisher, subscriber):
    sub = subscriber(publisher({"a": torch.ones(2), "m": torch.ones(2, 3)}))
    for strides, fits in (((2, 1), False), ((3, 1), True), ((1, 2), True), ((1, 1), False), ((4, 1), True)):
        target = torch.zeros(12).as_strided((2, 3), strides)
        out = TensorDict({"a": torch.zeros(2), "m": target}, batch_size=[])
        if fits:
            sub.snapshot(out)
            assert (target == 1).all()
        else:
            with pytest.raises(ValueError, match="m of out has several elements"):
                sub.snapshot(out)
            assert out["a"].tolist() == [0, 0]


def test_leaves_that_share_memory_are_refused(sub):
    memory = torch.zeros(6)
    out = out_with(a=memory[:4], b=memory[2:])
    with pytest.raises(ValueError, match="a and b share memory"):
        sub.snapshot(out)
    assert memory.tolist() == [0] * 6
    together = torch.zeros(4, 2)  # columns share a range of memory, and no byte of it
    sub.snapshot(out_with(a=together[:, 0], b=together[:, 1]))
    assert (together == 1).all()


def test_tied_leaves_may_be_one_tensor_in_out(publisher, subscriber):
    tied = torch.ones(4)
    sub = subscriber(publisher({"a": tied, "b": tied, "c": torch.full((4,), 2.0)}))
    one = torch.zeros(4)
    sub.snapshot(TensorDict({"a": one, "b": one, "c": torch.zeros(4)}, batch_size=[]))
    assert one.tolist() == [1] * 4
    with pytest.raises(ValueError, match="share memory"):
        sub.snapshot(TensorDict({"a": one, "b": one.clone(), "c": one}, batch_size=[]))


def test_what_is_made_anew_at_each_look_is_refused(publisher, subscriber):
    sub = subscriber(publisher({"a": torch.ones(2), "n": {"b": torch.ones(2, 4)}}))
    parts = [TensorDict({"b": torch.zeros(4)}, batch_size=[]) for _ in range(2)]
    out = TensorDict({"a": torch.zeros(2), "n": LazyStackedTensorDict(*parts)}, batch_size=[])
    with pytest.raises(ValueError, match=r"n\.b of out is made again"):
        sub.snapshot(out)
    assert out["a"].tolist() == [0, 0]


def test_another_type_is_a_type_error(sub):
    with pytest.raises(TypeError, match="out is a TensorDict with the arena's keys, not a dict"):
        sub.snapshot({name: torch.zeros(4, dtype=dtype) for name, dtype in PLAIN.items()})


@pytest.mark.parametrize("strided", [False, True])
def test_parameters_and_inference_tensors_take_a_snapshot(publisher, subscriber, strided):
    sub = subscriber(publisher({"p": torch.ones(4, 3), "i": torch.ones(4, 3)}))
    with torch.inference_mode():
        made = torch.zeros(3, 4).t() if strided else torch.zeros(4, 3)
    parameter = nn.Parameter(torch.zeros(3, 4).t() if strided else torch.zeros(4, 3))
    before = parameter._version
    out = TensorDict({"p": parameter, "i": made}, batch_size=[])
    assert sub.snapshot(out).weights is out
    assert (parameter == 1).all() and (made == 1).all()
    assert parameter.requires_grad and parameter.is_leaf
    assert parameter._version > before  # autograd notices, should it have saved the old values


def test_a_snapshot_into_an_update_of_another_arena(publisher, subscriber):
    sub = subscriber(publisher({"t": torch.ones(4)}))
    relay = publisher({"t": torch.zeros(4)})
    with relay.update() as weights:
        sub.snapshot(weights)
    assert relay.weights["t"].tolist() == [1] * 4


def test_the_slab_of_the_same_arena_is_refused(both):
    pub, sub = both({"t": torch.ones(4)}, slots=2)
    with pub.update() as weights:
        for out in (weights, pub.weights, sub.weights):
            with pytest.raises(ValueError, match="lies in the arena itself"):
                sub.snapshot(out)
    assert isinstance(sub.snapshot(), shmsync.Snapshot)
