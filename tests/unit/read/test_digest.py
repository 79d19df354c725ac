"""digest() of publisher and subscriber: equal where a process has what was published, with its version."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shmsync
from support.weights import fail_half_way


class Net(nn.Module):
    """Tied weights, another order of memory, a scalar, an empty buffer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.emb, self.out = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
        self.out.weight = self.emb.weight
        self.register_buffer("none", torch.empty(0, 4))


def change(module, value):
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(value)


@pytest.fixture
def ends(both):
    """ends(...) -> a trainer's module, a worker's that is bound to it, and both ends."""

    def make(**options):
        trainer, worker = Net(), Net().eval()
        pub, sub = both(trainer, **options)
        sub.bind(worker)
        return trainer, worker, pub, sub

    return make


@pytest.mark.parametrize("slots", [1, 3])
def test_publisher_subscriber_and_bound_module_have_equal_digests(ends, slots):
    trainer, worker, pub, sub = ends(slots=slots)
    seen = []
    for version in (1, 2, 3):
        found = pub.digest()
        assert found == sub.digest() == sub.digest(worker) == sub.digest(trainer)
        assert found[0] == version and list(found[1]) == list(trainer.state_dict())
        assert found[1]["out.weight"] == found[1]["emb.weight"]
        seen.append(found[1]["conv.weight"])
        change(trainer, version)
        pub.publish()
    assert len(set(seen)) == 3


def test_what_a_module_holds_instead_has_another_digest(ends):
    _, worker, pub, sub = ends()
    worker.conv.weight.data = torch.full_like(worker.conv.weight, 7.0)  # out of the arena
    worker.norm.running_mean.add_(1)
    worker.out.weight = nn.Parameter(torch.zeros(3, 4))  # untied
    (version, theirs), (_, ours) = sub.digest(worker), pub.digest()
    differ = {name for name in ours if theirs[name] != ours[name]}
    assert (version, differ) == (1, {"conv.weight", "norm.running_mean", "out.weight"})
    half = copy.deepcopy(Net()).half()
    half.load_state_dict(sub.state_dict())
    assert sub.digest(half)[1]["conv.bias"] != ours["conv.bias"]  # another dtype has other bytes


def test_parts_of_the_model_and_what_they_lack(ends):
    trainer, _, pub, sub = ends()
    parts = [nn.ModuleDict({name: each}) for name, each in trainer.named_children()]
    with pytest.raises(shmsync.ManifestMismatch, match="none is missing"):
        sub.digest(*parts)
    rest = nn.Module()
    rest.register_buffer("none", trainer.none)
    assert sub.digest(rest, *parts) == pub.digest()
    other = nn.ModuleDict({"norm": nn.BatchNorm1d(4)})
    change(other, 5)
    with pytest.raises(ValueError, match=r"different values of norm\."):
        sub.digest(trainer, other)
    with pytest.raises(shmsync.ManifestMismatch, match=r"norm.weight has shape \(2,\) instead of \(4,\)"):
        sub.digest(nn.ModuleDict({"norm": nn.BatchNorm1d(2)}))
    with pytest.raises(TypeError, match=r"takes torch\.nn\.Module"):
        sub.digest("policy")


def test_a_half_written_version_has_none(publisher):
    pub = publisher({"t": torch.zeros(4)})
    fail_half_way(pub, "t")
    with pytest.raises(shmsync.Poisoned):
        pub.digest()
    pub.publish()
    assert pub.digest()[0] == pub.version
