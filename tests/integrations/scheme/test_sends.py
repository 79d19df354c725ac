"""What a trainer sends, in every form, and who gets it."""

from __future__ import annotations

import time

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmsync.memory.arena import _all_mapped
from support.processes import until
from support.torchrl.pair import Counting, filled, net


def test_connect_gives_the_weights_and_send_the_new_ones(pair):
    model = filled(net(), 1)
    both = pair(model)
    assert all((w == 1).all() for w in both.weights("0.weight"))
    assert both.sender.send(filled(model, 2)) == 2
    for name in ("0.weight", "1.running_mean", "2.bias"):
        assert all((w == 2).all() for w in both.weights(name))
    filled(model, 3)
    assert all((w == 2).all() for w in both.weights("0.weight")), "the trainer's own tensors are nobody else's"
    both.sender.send()
    assert all((w == 3).all() for w in both.weights("0.weight"))
    assert (both.sender.weights["0", "weight"] == 3).all()
    assert (both.receivers[0].weights["0", "weight"] == 3).all()


def test_the_forms_of_init_on_sender(pair):
    model, other = filled(net(), 1), filled(net(), 2)
    first, second = TensorDict.from_module(model).data, TensorDict.from_module(other).data
    assert [w.mean() for w in pair(model, start={"weights": first, "devices": [None, None]}).weights("0.weight")] == [
        1, 1,
    ]  # fmt: skip
    apart = pair(model, start={"params_map": {0: first, 1: second}})
    assert [w.mean() for w in apart.weights("0.weight")] == [1, 2]
    filled(other, 3)
    apart.sender.send()
    assert [w.mean() for w in apart.weights("0.weight")] == [1, 3]
    mapped = pair(
        model, start={"model": model, "device_map_fn": lambda i, td: td.apply(lambda t: t + i), "num_workers": 2}
    )
    assert [w.mean() for w in mapped.weights("0.weight")] == [1, 2]
    filled(model, 5)
    mapped.sender.send()
    assert [w.mean() for w in mapped.weights("0.weight")] == [5, 6]


def test_tied_parameters_and_identity(pair):
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    both = pair(model)
    own = both.models[0]
    weight = own["a"].weight
    assert own["b"].weight is weight
    both.sender.send(filled(model, 4))
    assert own["b"].weight is weight and own["a"].weight is weight and (weight == 4).all()


def _written_arenas():
    """Arenas that this process has mapped to write; one that was released may wait for the garbage collector."""
    return {arena for arena in _all_mapped() if getattr(arena._slab, "writable", None) is not None}


def test_extra_state_goes_with_the_weights_and_may_grow(pair):
    before = _written_arenas()
    model = Counting()
    both = pair(model)
    assert [own.words for own in both.models] == [["a"], ["a"]]
    model.words = ["b", "c"]
    both.sender.send(filled(model, 2))
    assert [own.words for own in both.models] == [["b", "c"]] * 2
    model.words = ["long " * 200] * 10
    both.sender.send(filled(model, 3))
    model.words = [f"longer {i}" for i in range(2000)]
    both.sender.send(filled(model, 4))
    assert [len(own.words) for own in both.models] == [2000, 2000]
    assert all((w == 4).all() for w in both.weights("linear.weight"))
    both.sender.send({"linear.weight": torch.full((2, 2), 6.0)})
    assert [len(own.words) for own in both.models] == [2000, 2000]
    both.sender.send({**filled(model, 5).state_dict(), "_extra_state": {"words": ["d"]}})
    assert [own.words for own in both.models] == [["d"], ["d"]]
    both.sender.send(filled(nn.ModuleDict({"linear": nn.Linear(2, 2)}), 8))  # has none: what is there stays
    assert [own.words for own in both.models] == [["d"], ["d"]]
    assert all((w == 8).all() for w in both.weights("linear.weight"))
    assert len(_written_arenas() - before) == 1, "arenas that were left"
    weights = TensorDict.from_module(filled(model, 6)).data
    weights["__extra_state__"] = TensorDict({"words": torch.ones(2)})
    both.sender.send(weights)
    assert all((own.words == torch.ones(2)).all() for own in both.models)


def test_a_failure_nobody_waited_for_raises_at_the_next_update(pair):
    model = Counting()
    both = pair(model, sync=False)
    model.words = ["refused"]
    both.sender.send(filled(model, 2))
    until(lambda: (both.weights("linear.weight")[1] == 2).all())
    model.words = ["fine"]
    with pytest.raises(ArithmeticError):
        for _ in range(1000):  # the first after the worker has told of it
            both.sender.send(filled(model, 3))
            time.sleep(0.01)
    both.sender.send(filled(model, 4))
