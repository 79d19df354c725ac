"""adopt(): the trainer's parameters are the slab."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shmsync


def test_adopted_parameters_are_the_slab(publisher, subscriber):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    pub = publisher(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    pub.adopt(module, optimizer)
    assert pub.version == 1
    sub = subscriber(pub)
    before = sub.weights["0", "weight"].clone()
    for version in range(2, 5):
        module(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        assert pub.version == version
        sub.refresh()
        assert torch.equal(sub.weights["0", "weight"], module[0].weight)
        assert torch.equal(sub.weights["1", "running_mean"], module[1].running_mean)
    assert not torch.equal(before, module[0].weight)
    with pub.update():
        optimizer.step()  # inside update() already: joins it
    assert pub.version == 5
    pub.close()
    module[0].weight.data.add_(1)  # private again
    assert not torch.equal(sub.weights["0", "weight"], module[0].weight)


def test_adopt_publishes_first_what_differs(publisher, subscriber):
    pub = publisher(nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    pub.adopt(other)
    assert pub.version == 2
    assert torch.equal(subscriber(pub).weights["weight"], other.weight)


def test_adopt_needs_one_slot(publisher):
    pub = publisher(nn.Linear(2, 2), slots=2)
    with pytest.raises(ValueError, match="publish"):
        pub.adopt(nn.Linear(2, 2))


def test_a_failing_close_still_ends_the_arena(publisher, monkeypatch):
    module = nn.Linear(2, 2)
    pub = publisher(module)
    pub.adopt(module)

    def no_memory():
        raise RuntimeError("no memory")

    monkeypatch.setattr(pub._side.adopted, "give_back", no_memory)
    with pytest.raises(RuntimeError, match="no memory"):
        pub.close()
    with pytest.raises(shmsync.ArenaNotFound):
        shmsync.Subscriber(pub.handle)


# ---- adopt


def test_adopting_never_casts_the_trainers_parameters(publisher):
    module = nn.Linear(2, 2)
    pub = publisher(module, dtype=torch.bfloat16)
    with pytest.raises(shmsync.ManifestMismatch, match="cast"):
        pub.adopt(module)
    assert module.weight.dtype == torch.float32


def test_the_optimizer_of_another_module_is_refused(publisher):
    module = nn.Linear(2, 2)
    pub = publisher(module)
    with pytest.raises(ValueError, match="none of them"):
        pub.adopt(module, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    pub.adopt(module)


def test_adopted_parameters_that_were_taken_out_go_in_again(publisher, subscriber):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    pub = publisher(module)
    sub = subscriber(pub)
    pub.adopt(module, optimizer)
    module.half().float()
    module.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(sub.snapshot().weights["weight"], module.weight)
    module.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(sub.snapshot().weights["weight"], module.weight)
    module.half()
    with pytest.raises(shmsync.ManifestMismatch, match="does not fit"), pub.update():
        pass


def test_buffers_of_an_adopted_module_belong_to_the_version_they_were_made_in(publisher, subscriber):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    pub = publisher(module)
    sub = subscriber(pub)
    pub.adopt(module)
    with pub.update(), torch.no_grad():
        module(torch.randn(8, 3))
    assert torch.equal(sub.snapshot().weights["1", "running_mean"], module[1].running_mean)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_made_after_adopting_sees_the_steps(publisher):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    pub = publisher(module)
    pub.adopt(module, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        module.weight.grad = torch.ones(2, 2)
        optimizer.step()
        scheduler.step()
    assert (pub.version, scheduler.get_last_lr()) == (3, [0.25])


def test_a_refused_look_at_an_adopted_module_is_not_taken_for_a_good_one(publisher, subscriber):
    module = nn.Linear(4, 3)
    pub = publisher(module)
    pub.adopt(module)
    sub = subscriber(pub)
    bias = module.bias.data
    module.weight.data = torch.full((3, 4), 7.0)  # not in the slab any more: it has to go in with the next version
    module.bias.data = torch.zeros(5)
    with pytest.raises(shmsync.ManifestMismatch, match="bias"):
        pub.publish()
    module.bias.data = bias
    assert pub.publish() == 2
    with sub.read() as section:
        assert section.weights["weight"].unique().tolist() == [7.0]
