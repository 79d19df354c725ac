"""What a trainer sends, in every form, and who gets it."""

from __future__ import annotations

import random
import time

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from support.processes import until
from support.torchrl.pair import net
from support.weights import fill as filled


class Counting(nn.Module):
    """Has extra state that grows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.words = ["a"]

    def forward(self, x):
        return self.linear(x)

    def get_extra_state(self):
        return {"words": list(self.words)}

    def set_extra_state(self, state):
        if state["words"] == ["refused"]:
            raise ArithmeticError("no such word")
        self.words = state["words"]


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


def test_extra_state_goes_with_the_weights_and_may_grow(pair):
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
    with pytest.raises(shmsync.ManifestMismatch, match=r"extra state has \d+ bytes, .* room for 65536"):
        model.words = ["x" * 70_000]
        both.sender.send(filled(model, 9))
    assert all((w == 8).all() for w in both.weights("linear.weight"))
    weights = TensorDict.from_module(filled(model, 6)).data
    weights["__extra_state__"] = TensorDict({"words": torch.ones(2)})
    both.sender.send(weights)
    assert all((own.words == torch.ones(2)).all() for own in both.models)


def test_a_failure_nobody_waited_for_raises_at_a_later_update(pair):
    model = Counting()
    both = pair(model, sync=False)
    model.words = ["refused"]
    with pytest.raises(ArithmeticError):
        for _ in range(1000):  # the first after a worker has told of it
            both.sender.send(filled(model, 2))
            time.sleep(0.01)
    model.words = ["fine"]

    def is_sent():
        try:
            return both.sender.send(filled(model, 3))
        except ArithmeticError:  # of an update before
            return False

    until(is_sent)
    until(lambda: all((w == 3).all() for w in both.weights("linear.weight")))


def linear(value=0.0):
    return filled(nn.Linear(2, 2), float(value))


@pytest.mark.parametrize("options", [{}, {"slots": 2}, {"per_worker_weights": True}], ids=str)
def test_updates_in_any_order(pair, options):
    draw = random.Random(1)
    own, workers = linear(), 3
    made = pair(own, workers=workers, **options)
    value, have = 0, [0] * workers
    at_others = [None] * workers  # the policy's value when other weights went to the worker
    for _ in range(40):
        chosen = draw.choice([None, [0], [1, 2], [0, 1, 2], [2]]) if options.get("per_worker_weights") else None
        reached = range(workers) if chosen is None else chosen
        step = draw.choice(["write", "write again", "others", "others by worker", "policy", "nothing", "nothing"])
        if step.startswith("write"):
            value += step == "write"  # the same values once more are no change
            filled(own, value)
        elif step in ("policy", "nothing"):
            made.sender.send(own if step == "policy" else None, chosen)
            for worker in reached:
                if step == "policy" or at_others[worker] != value:
                    have[worker], at_others[worker] = value, None
        else:
            other = draw.randrange(1000, 2000)
            apart = step == "others by worker" and options.get("per_worker_weights")
            sent = linear(other)
            if apart:
                made.sender.send({worker: linear(other + worker) for worker in reached})
            else:
                made.sender.send(draw.choice([sent, sent.state_dict(), dict.fromkeys(reached, sent)]), chosen)
            filled(sent, -1.0)  # it may change afterwards
            for worker in reached:
                have[worker], at_others[worker] = other + worker * bool(apart), value
        for worker in range(workers):
            assert made.weights("weight")[worker].unique().tolist() == [have[worker]], (step, chosen)


def test_extra_state_alone_may_change(pair):
    own = Counting()
    made = pair(own, workers=1)
    other = Counting()
    other.words = ["other"]
    made.sender.send(other)
    made.sender.send(None)
    assert made.models[0].words == ["other"]
    own.words = ["own"]
    made.sender.send(None)
    assert made.models[0].words == ["own"]
