"""Tensors that change between two publishes of what holds them: each publish gives what they are now, or an error."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from support.odd_tensors import CHANGES, SHAPES


class Holder:
    """Tensors that are held in one way; `source` is what is published."""

    def __init__(self, how):
        made = {name: torch.rand(shape) for name, shape in SHAPES.items()}
        self.how = how
        if how == "module":
            self.source = nn.Module()
            for name, tensor in made.items():
                self.source.register_buffer(name, tensor)
        elif how == "parameters":
            self.source = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in made.items()})
        else:
            if "nested" in how:
                made = {"n": {name: made[name] for name in "abc"}, "one": made["one"], "w": made["w"]}
            self.source = TensorDict(made) if "TensorDict" in how else made

    def _level(self, name):
        if self.how == "module":
            return self.source._buffers
        if self.how == "parameters":
            return self.source._parameters
        if "nested" in self.how and name in "abc":
            return self.source["n"]
        return self.source

    def __getitem__(self, name):
        return self._level(name)[name]

    def replace(self, name, tensor, way):
        level, tensor = self._level(name), nn.Parameter(tensor) if self.how == "parameters" else tensor
        if way == "update":
            level.update({name: tensor})
        elif way == "in a new level" and level is not self.source and "nested" in self.how:
            self.source["n"] = {**dict(level.items()), name: tensor}
        else:
            if way == "behind the others":
                level.pop(name)
            level[name] = tensor

    def key(self, name):
        return ("n", name) if "nested" in self.how and name in "abc" else name


def holding(tensor, how):
    """A source that holds this tensor as "t", and the tensor as it has it."""
    if how == "dict":
        return {"t": tensor}, tensor
    if how == "TensorDict":
        return TensorDict({"t": tensor}), tensor
    source = nn.Module()
    if how == "module":
        source.register_buffer("t", tensor)
    else:
        source.t = nn.Parameter(tensor)
    return source, source.t


EVERY_CHANGE = {
    **CHANGES,
    "data, imaginary": lambda t: setattr(t, "data", torch.rand(t.shape, dtype=torch.complex64).conj().imag),
    "inference": lambda t: setattr(t, "data", torch.inference_mode()(torch.rand)(t.shape)),
}
REPLACED = {
    "another tensor": lambda t: torch.rand(t.shape),
    "its clone": lambda t: t.detach().clone(),
    "its detach()": lambda t: t.detach(),
    "a parameter": lambda t: nn.Parameter(torch.rand(t.shape)),
}

PUT_IN = ["in its place", "behind the others", "in a new level", "update"]


def fits(tensor, name, cast):
    """Could it be read, and is it what the arena has?"""
    storage = tensor.untyped_storage()
    return (
        tuple(tensor.shape) == SHAPES[name]
        and (cast or tensor.dtype is torch.float32)
        and storage.nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    )


@pytest.mark.parametrize("cast", [False, True], ids=["as bytes", "cast"])
@pytest.mark.parametrize("how", ["nested", "TensorDict, nested", "module", "parameters"])
def test_each_publish_gives_what_the_tensors_are_now(publisher, table, how, cast):
    draw = random.Random(0)
    holder = Holder(how)
    pub = publisher(holder.source, dtype={"*": torch.float64} if cast else None)
    names = list(SHAPES)
    for _ in range(60):
        name = draw.choice(names)
        with contextlib.suppress(RuntimeError):  # torch refuses some to tensors made in inference mode
            if draw.random() < 0.6:
                EVERY_CHANGE[draw.choice(list(EVERY_CHANGE))](holder[name])
            else:
                holder.replace(name, REPLACED[draw.choice(list(REPLACED))](holder[name]), draw.choice(PUT_IN))
        version = pub.version
        if all(fits(holder[each], each, cast) for each in names):
            assert pub.publish(draw.choice([holder.source, None])) == version + 1
            for each in names:
                assert torch.equal(pub.weights[holder.key(each)].double(), holder[each].data.double()), each
        else:
            before = {each: pub.weights[holder.key(each)].clone() for each in names}
            with pytest.raises(shmsync.ManifestMismatch):
                pub.publish(draw.choice([holder.source, None]))
            assert pub.version == version
            assert all(torch.equal(pub.weights[holder.key(each)], was) for each, was in before.items())
            holder.replace(name, torch.rand(SHAPES[name]), "in its place")
    pub.publish(holder.source)


@pytest.mark.parametrize("cast", [False, True], ids=["as bytes", "cast"])
@pytest.mark.parametrize("how", ["TensorDict", "parameters", "own class"])
def test_a_source_that_lies_in_the_slab_is_refused_each_time(publisher, how, cast):
    tensor = torch.ones(64).as_subclass(type("Own", (torch.Tensor,), {})) if how == "own class" else torch.ones(64)
    source, tensor = holding(tensor, "TensorDict" if how == "own class" else how)
    pub = publisher({"t": torch.ones(64)}, slots=2, dtype={"*": torch.float64} if cast else None)
    for _ in range(3):
        pub.publish(source)
    tensor.data = pub.weights["t"].view(torch.float32)[:64]
    for _ in range(3):
        with pytest.raises(shmsync.ManifestMismatch, match="inside arena"):
            pub.publish(source)
