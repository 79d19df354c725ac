"""snapshot(out=) into the same TensorDict again and again: quick, and as careful as the first time."""

from __future__ import annotations

import contextlib
import random
import weakref

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from support.calls import calls_of
from support.odd_tensors import CHANGES, SHAPES
from support.processes import until

INNER = ("b", "c")  # in a TensorDict of their own, where they are nested


def many(leaves, nested):
    if nested:
        return {f"n{number}": {f"t{each}": torch.rand(3) for each in range(10)} for number in range(leaves // 10)}
    return {f"t{number}": torch.rand(3) for number in range(leaves)}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_an_out_that_is_used_again_takes_no_call_for_a_leaf(both, nested, slots):
    counts = []
    for leaves in (50, 400):
        pub, sub = both(many(leaves, nested), slots=slots)
        out = sub.snapshot().weights
        sub.snapshot(out)
        counts.append(len(calls_of(lambda sub=sub, out=out: sub.snapshot(out))))
        pub.publish(many(leaves, nested))
        assert sub.snapshot(out).version == 2
        assert (out == sub.weights).all()
        sub.close()
        pub.close()
    assert abs(counts[1] - counts[0]) < 35  # an arena that is not gone yet takes some


def layout(tensors):
    nested = {"n": {key: tensors[key] for key in INNER}}
    return {key: each for key, each in tensors.items() if key not in INNER} | nested


def made(how):
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    shared[:] = [torch.zeros(2000)]
    tensors["a"] = of_shared(tensors["a"])
    if how == "parameters":
        tensors = {name: nn.Parameter(each) for name, each in tensors.items()}
    if how == "inference":
        with torch.inference_mode():
            tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return TensorDict(layout(tensors))


shared = []  # the memory that has the leaf "a" of the newest `out`


def of_shared(tensor):
    return shared[0][: tensor.numel()].view(tensor.shape)


def level(out, name):
    return out["n"] if name in INNER else out


def alias(tensor, inference=False):
    """Another tensor over the same memory."""
    with torch.inference_mode(inference):
        return torch.empty(0).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())


def uncounted(tensor):
    """An ordinary tensor over the same memory, to whose changes autograd has no counter."""
    with torch.inference_mode():
        made = torch.zeros(tensor.shape)
    made.data = tensor
    return made


def of_the_arena(tensor, sub):
    return next(each for each in sub.weights.values(True, True) if each.shape == tensor.shape)


IN_PLACE = {
    **{name: lambda t, sub, change=change: change(t) for name, change in CHANGES.items()},
    "nothing": lambda t, sub: None,
    "data, expanded": lambda t, sub: setattr(t, "data", torch.rand(1).expand(t.shape)),
    "data, shared with others": lambda t, sub: setattr(t, "data", of_shared(t)),
    "data, of inference mode": lambda t, sub: setattr(t, "data", alias(t.data, inference=True)),
    "data, in the arena": lambda t, sub: setattr(t, "data", of_the_arena(t, sub)),
    "set_, expanded": lambda t, sub: t.data.set_(torch.rand(1).untyped_storage(), 0, t.shape, (0,) * t.dim()),
    "as_strided_": lambda t, sub: t.data.as_strided_(t.shape, (0,) * t.dim()),
    "swapped with one of the same place that counts no changes": lambda t, sub: torch.utils.swap_tensors(
        t, uncounted(t.data)
    ),
}  # fmt: skip
REPLACED = {
    "another tensor": lambda t, sub: torch.rand(t.shape),
    "a parameter": lambda t, sub: nn.Parameter(torch.rand(t.shape)),
    "an inference tensor": lambda t, sub: torch.inference_mode()(torch.rand)(t.shape),
    "a view in another order": lambda t, sub: torch.rand(t.shape[::-1]).permute(*range(t.dim())[::-1]),
    "expanded": lambda t, sub: torch.rand(1).expand(t.shape),
    "negated": lambda t, sub: torch._neg_view(torch.rand(t.shape)),
    "meta": lambda t, sub: torch.rand(t.shape, device="meta"),
    "another dtype": lambda t, sub: torch.rand(t.shape, dtype=torch.float64),
    "another shape": lambda t, sub: torch.rand(2, *t.shape),
    "the arena's": lambda t, sub: of_the_arena(t, sub),
    "shared with others": lambda t, sub: of_shared(t),
    "a TensorDict": lambda t, sub: TensorDict({"deep": torch.zeros(4)}),
}


def without(out, name):
    level(out, name).del_(name)


WHOLE = {
    "a leaf is gone": without,
    "a leaf more": lambda out, name: level(out, name).set("more", torch.zeros(3)),
    "another level": lambda out, name: out.set("n", TensorDict({key: torch.zeros(SHAPES[key]) for key in INNER})),
    "another dict": lambda out, name: out.select("n", "a", "one", "w", inplace=True),
    "another dict, a leaf less": lambda out, name: out.select("n", "a", "one", inplace=True),
    "a leaf under another key": lambda out, name: level(out, name).rename_key_(name, "other"),
    "locked": lambda out, name: out.lock_(),
    "a level is stacked lazily": lambda out, name: out.set(
        "n", torch.stack([TensorDict({key: torch.zeros(SHAPES[key][1:] or (6,)) for key in INNER})] * 2)
    ),
}


CHANGES_OF_OUT = [*IN_PLACE, *REPLACED, *WHOLE]


def change_out(out, name, change, sub):
    if change in IN_PLACE:
        IN_PLACE[change](level(out, name)[name], sub)
    elif change in REPLACED:
        level(out, name)._tensordict[name] = REPLACED[change](level(out, name)[name], sub)
    else:
        WHOLE[change](out, name)


def said_by(sub, out):
    try:
        sub.snapshot(out)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def values_of(out):
    """What can be read of it, bit for bit."""
    found = {}
    for key, tensor in out.items(True, True):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
            if tensor.device.type == "cpu" and held >= tensor.numel() * tensor.element_size():
                found[key] = tensor.detach().clone()
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("slots", "consistency"), [(1, "pinned"), (2, "optimistic")])
@pytest.mark.parametrize("how", ["tensors", "parameters", "inference"])
def test_a_change_is_noticed_as_if_it_came_for_the_first_time(both, table, how, slots, consistency, seed):
    """Every change, twice, in an order and to leaves that are drawn."""
    draw = random.Random(seed)
    pub, sub = both(
        layout({name: torch.rand(shape) for name, shape in SHAPES.items()}), slots=slots, consistency=consistency
    )
    out = made(how)
    assert said_by(sub, out) == "done"
    assert said_by(sub, out) == "done"
    applied = set()
    for change in draw.sample(CHANGES_OF_OUT * 2, 2 * len(CHANGES_OF_OUT)):
        name = draw.choice(list(SHAPES))
        with contextlib.suppress(RuntimeError):  # torch refuses some to some tensors
            change_out(out, name, change, sub)
            applied.add(change)
        pub.publish(layout({name: torch.rand(shape) for name, shape in SHAPES.items()}))
        before = values_of(out)
        said = said_by(sub, out)
        if said == "done":
            assert all(torch.equal(out[key], value) for key, value in sub.weights.items(True, True)), change
        else:
            after = values_of(out)
            assert before.keys() == after.keys()
            assert all(torch.equal(value, after[key]) for key, value in before.items()), change
        with shmsync.Subscriber(pub.handle) as fresh:
            assert said_by(fresh, out) == said, change
        if said != "done" or draw.random() < 0.1:
            out = made(how)
            assert said_by(sub, out) == "done"
    assert applied == set(CHANGES_OF_OUT) or how != "tensors"


def test_autograd_sees_each_write(publisher, subscriber):
    sub = subscriber(publisher({"t": torch.ones(3)}))
    out = TensorDict({"t": torch.zeros(3)})
    for _ in range(4):
        before = out["t"]._version
        sub.snapshot(out)
        assert out["t"]._version > before


def test_several_are_used_in_turns(both):
    _, sub = both(many(100, nested=False))
    outs = [sub.snapshot().weights for _ in range(2)]
    for out in outs * 2:
        sub.snapshot(out)
    first, second = (len(calls_of(lambda out=out: sub.snapshot(out))) for out in outs)
    assert first == second < 100


def test_what_is_kept_does_not_outlive_its_owner(publisher, subscriber):
    sub = subscriber(publisher({"a": torch.ones(3), "n": {"b": torch.ones(3)}}))
    out = sub.snapshot().weights
    tensor = weakref.ref(out["a"])
    for _ in range(3):
        sub.snapshot(out)
    del out
    assert tensor() is None
    kept = sub.snapshot().weights
    for _ in range(3):
        sub.snapshot(kept)
    tensor = weakref.ref(kept["a"])
    sub.close()
    kept.set("a", torch.zeros(3))
    assert tensor() is None


def test_a_subscriber_that_is_dropped_needs_no_garbage_collector(publisher):
    sub = shmsync.Subscriber(publisher({"a": torch.ones(3)}).handle)
    out = sub.snapshot().weights
    sub.snapshot(out)
    reference = weakref.ref(sub)
    sub.close()
    del sub
    assert reference() is None


@pytest.mark.parametrize("into", [False, True], ids=["new memory", "out"])
def test_a_snapshot_across_a_restart_is_of_the_arena_that_its_version_is_of(publisher, into):
    old = publisher({"t": torch.full((300,), -1.0)}, name="kept-out", slots=2)
    sub = shmsync.Subscriber(old.handle, follow=True)
    try:
        out = sub.snapshot().weights if into else None
        sub.snapshot(out)
        old.close()
        new = publisher({"t": torch.full((300,), 1.0)}, name="kept-out", slots=3)
        for number in range(2, 5):
            new.publish({"t": torch.full((300,), float(number))})
        session = sub.session

        def moved():
            found = sub.snapshot(out)
            expected = -1 if sub.session == session else found.version
            assert (found.weights["t"] == expected).all()
            return expected > 0

        until(moved)
    finally:
        sub.close()
