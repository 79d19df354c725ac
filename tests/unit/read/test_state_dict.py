"""state_dict() of publisher, subscriber and snapshot; and leaves by dotted key."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from support.weights import fail_half_way


class Net(nn.Module):
    """Tied weights, a buffer that is saved, and one that is not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.layers[0].weight
        self.register_buffer("scratch", torch.ones(3), persistent=False)


FROM = {
    "publisher": lambda pub, sub: pub.state_dict(),
    "subscriber": lambda pub, sub: sub.state_dict(),
    "snapshot": lambda pub, sub: sub.snapshot().state_dict(),
    "pickled snapshot": lambda pub, sub: pickle.loads(pickle.dumps(sub.snapshot())).state_dict(),
}


def size(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return len(file.getvalue())


@pytest.mark.parametrize("source", FROM)
@pytest.mark.parametrize("slots", [1, 2])
def test_it_is_that_of_the_published_module(both, source, slots):
    trainer = Net()
    pub, sub = both(trainer, slots=slots)
    state, own = FROM[source](pub, sub), trainer.state_dict()
    assert list(state) == list(own)
    for key, value in own.items():
        assert torch.equal(state[key], value) and state[key].dtype == value.dtype and not state[key].requires_grad
    fresh = Net()
    fresh.load_state_dict(state)
    assert torch.equal(fresh.head.weight, trainer.head.weight)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True).keys() == own.keys()
    before = state["head.bias"].clone()  # it is private: it stays, and may be written
    with torch.no_grad():
        trainer.head.bias.add_(1)
    pub.publish()
    assert torch.equal(state["head.bias"], before)
    state["head.bias"].zero_()
    assert torch.equal(pub.state_dict()["head.bias"], trainer.head.bias)


def test_files_are_as_large_as_the_weights(both, publisher, subscriber):
    big = nn.ModuleDict({"a": nn.Linear(300, 300, bias=False), "b": nn.Linear(300, 300, bias=False)})
    big["b"].weight = big["a"].weight
    pub, sub = both(big)
    bytes_of_weights = big["a"].weight.nbytes
    assert size(pub.state_dict()) < 1.1 * bytes_of_weights  # tied leaves stand there once
    assert size(sub.state_dict()) < 1.1 * bytes_of_weights
    single = nn.Linear(300, 300, bias=False)
    again = publisher(single)
    assert len(pickle.dumps(subscriber(again).snapshot())) < 1.1 * bytes_of_weights


def test_a_poisoned_arena_has_no_state(publisher):
    pub = publisher({"t": torch.zeros(2)})
    fail_half_way(pub, "t")
    with pytest.raises(shmsync.Poisoned):
        pub.state_dict()


def test_a_state_inside_update_is_refused(publisher):
    pub = publisher({"t": torch.zeros(2)}, slots=2)
    with pub.update(), pytest.raises(shmsync.WriterBusy):
        pub.state_dict()
    pub.close()
    with pytest.raises(shmsync.ClosedError):
        pub.state_dict()


# ---- dotted keys


def sources(pub, sub):
    with sub.read() as section:
        yield section.weights
    yield from (pub.weights, sub.weights, sub.snapshot().weights)


def test_a_leaf_by_its_dotted_key_is_the_leaf(both):
    pub, sub = both(Net())
    for weights in sources(pub, sub):
        assert isinstance(weights, TensorDict)
        assert weights["layers.0.bias"] is weights["layers", "0", "bias"] is weights["layers"]["0"]["bias"]
        assert weights["layers", "0.bias"] is weights.get("layers.0.bias") is weights["layers.0.bias"]
        assert weights["layers.3"] is weights["layers", "3"]
        assert weights["scratch"].tolist() == [1, 1, 1]
        for wrong in ("layers.9.bias", "layers.0", "layers.0.bias.x", ".", "a..b"):
            if wrong != "layers.0":
                with pytest.raises(KeyError):
                    weights[wrong]
                assert weights.get(wrong, None) is None
        assert weights[...] is weights
        assert set(weights.keys(True, True)) == set(pub.weights.keys(True, True))
    copies = (copy.deepcopy(pub.weights), pickle.loads(pickle.dumps(pub.weights)), sub.snapshot().weights.clone())
    for private in copies:
        assert torch.equal(private["layers", "0", "bias"], pub.weights["layers.0.bias"])


def test_update_takes_dotted_keys(both):
    pub, sub = both(Net())
    with pub.update() as weights:
        assert weights["layers.0.bias"] is weights["layers", "0", "bias"]
        weights["layers.0.bias"].fill_(2)
        weights.set_("head.bias", torch.full((4,), 4.0))
    with sub.read() as section:
        found = [section.weights[key][0].item() for key in ("layers.0.bias", "head.bias")]
    assert found == [2, 4]
    private = sub.snapshot().weights
    private["layers.0.bias"] = torch.ones(4)  # in a snapshot a leaf may be replaced
    assert private["layers", "0", "bias"].tolist() == [1] * 4


@pytest.mark.parametrize("key", ["layers.0.bais", ("layers", "0", "bais"), "nothing", ("layers", "7.bias")])
def test_a_key_that_is_not_there_poisons_nothing(both, key):
    pub, sub = both(Net())
    with pytest.raises(KeyError, match="bais|nothing|7"), pub.update() as weights:
        weights[key]
    with sub.read(timeout=0) as section:
        assert section.version == 1
    assert pub.publish() == 2
    with pytest.raises(KeyError), pub.update() as weights:  # after a leaf was handed out it does
        weights["layers.0.bias"].add_(1)
        weights[key]
    with pytest.raises(shmsync.Poisoned), sub.read(timeout=0):
        pass


def test_keys_with_dots_of_their_own_come_first(publisher, subscriber):
    pub = publisher(TensorDict({"a.b": torch.ones(1), "n": TensorDict({"a.b": torch.zeros(1)})}))
    for weights in sources(pub, subscriber(pub)):
        assert weights["a.b"].item() == 1
        assert weights["n.a.b"] is weights["n", "a.b"]
        assert weights["n.a.b"].item() == 0
