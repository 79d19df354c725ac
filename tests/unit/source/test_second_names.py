"""A tied tensor may go by one of its names alone, as in a checkpoint that saves shared tensors once."""

import pytest
import torch
from torch import nn

import shmsync
from shmsync.errors import ManifestMismatch
from support.jobs.engine import bind_copies


class Net(nn.Module):
    def __init__(self, tie="object", buffers=False):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tie == "object":
            self.head.weight = self.emb.weight
        elif tie == "memory":  # two parameters over one storage
            self.head.weight = nn.Parameter(self.emb.weight.data)
        if buffers:
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("average", self.mean)

    def forward(self, x):
        return self.head(self.emb(x))


def single(net):
    """Its weights as a checkpoint that saves shared tensors once has them."""
    return {name: each for name, each in net.state_dict().items() if name not in ("head.weight", "average")}


def change(net, value):
    with torch.no_grad():
        net.emb.weight.fill_(value)
    return net


def show(net):
    """Its output; a bound module moves to the newest version."""
    with torch.no_grad():
        return net(torch.arange(5))


WAYS = [(1, "pinned"), (2, "pinned"), (3, "optimistic")]


@pytest.mark.parametrize("bind", [shmsync.Subscriber.bind, bind_copies], ids=["views", "copies"])
@pytest.mark.parametrize("tie", ["object", "memory"])
@pytest.mark.parametrize(("slots", "consistency"), WAYS)
def test_worker_whose_module_has_the_tie_is_bound(publisher, subscriber, slots, consistency, tie, bind):
    trainer, worker = Net(), Net(tie)
    pub = publisher(single(trainer), slots=slots)
    bind(subscriber(pub, consistency=consistency), worker)
    for value in (1.0, 2.0, 3.0):
        pub.publish(single(change(trainer, value)))
        assert torch.equal(show(worker), show(trainer))


def test_worker_whose_module_lacks_the_tie_is_refused_by_name(publisher, subscriber):
    pub = publisher(single(Net()))
    with pytest.raises(ManifestMismatch, match=r"head\.weight is not in the arena"):
        subscriber(pub).bind(Net(tie=None))


@pytest.mark.parametrize("slots", [1, 2])
def test_module_with_the_tie_may_be_published_after_that(publisher, subscriber, slots):
    trainer, worker = Net(), Net()
    pub = publisher(single(trainer), slots=slots)
    subscriber(pub).bind(worker)
    for source in (trainer, trainer.state_dict()):
        pub.publish(change(trainer, 4.0) if source is trainer else source)
        show(worker)
        assert float(worker.head.weight.max()) == 4
    untied = Net(tie=None)
    for source in (untied, untied.state_dict()):
        with pytest.raises(ManifestMismatch, match=r"head\.weight is not in the arena"):
            pub.publish(source)


def without_head(net):
    part = nn.Module()
    part.emb = net.emb
    return part


@pytest.mark.parametrize("lacking", [single, without_head], ids=["checkpoint", "module"])
@pytest.mark.parametrize("slots", [1, 2])
def test_weights_without_the_second_name_may_follow_those_that_have_it(publisher, subscriber, slots, lacking):
    trainer, worker = Net(), Net()
    pub = publisher(trainer, slots=slots)
    subscriber(pub).bind(worker)
    pub.publish(lacking(change(trainer, 3.0)))
    show(worker)
    assert float(worker.head.weight.max()) == 3


def test_buffers_that_are_one_tensor(publisher, subscriber):
    trainer, worker = Net(buffers=True), Net(buffers=True)
    pub = publisher(single(trainer))
    subscriber(pub).bind(worker)
    for value in (1.0, 2.0):
        trainer.mean.fill_(value)
        pub.publish(single(trainer))
        show(worker)
        assert worker.average.tolist() == worker.mean.tolist() == [value] * 3


def test_tie_outlives_a_buffer_that_was_replaced(publisher, subscriber):
    trainer, worker = Net("memory", buffers=True), Net("memory", buffers=True)
    pub = publisher(single(trainer))
    subscriber(pub).bind(worker)
    worker.mean = torch.full((3,), 9.0)  # put back with the next version
    pub.publish(single(change(trainer, 6.0)))
    show(worker)
    assert float(worker.head.weight.max()) == float(worker.emb.weight.max()) == 6


def test_module_on_meta_is_bound(publisher, subscriber):
    trainer = change(Net(), 2.0)
    with torch.device("meta"):
        worker = Net()
    subscriber(publisher(single(trainer))).bind(worker)
    assert worker.head.weight is worker.emb.weight
    assert float(worker.head.weight.max()) == 2


def test_adopted_module_may_have_the_second_name(publisher, subscriber):
    trainer, worker = Net(), Net()
    pub = publisher(single(trainer))
    pub.adopt(trainer)
    subscriber(pub).bind(worker)
    with pub.update(), torch.no_grad():
        trainer.head.weight.fill_(8.0)
    show(worker)
    assert float(worker.emb.weight.max()) == 8
