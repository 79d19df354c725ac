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


@pytest.mark.parametrize("source", FROM)
@pytest.mark.parametrize("slots", [1, 2])
def test_it_is_that_of_the_published_module(both, source, slots):
    trainer = Net()
    pub, sub = both(trainer, slots=slots)
    state, own = FROM[source](pub, sub), trainer.state_dict()
    assert list(state) == list(own)
    if "snapshot" not in source:  # tied leaves are one tensor, and so once in a file
        assert state["head.weight"] is state["layers.0.weight"]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values())
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
