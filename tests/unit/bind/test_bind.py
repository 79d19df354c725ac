"""Bound modules: versions, buffers, gradients, and what becomes of them."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import shmsync
from support.jobs.engine import bind_copies
from support.weights import step


@pytest.mark.parametrize("how", [shmsync.Subscriber.bind, bind_copies], ids=["views", "copies"])
@torch.no_grad()
def test_outer_sections_hold_one_version_for_a_rollout(both, how):
    trainer, worker = nn.Linear(4, 2), nn.Linear(4, 2)
    pub, sub = both(trainer, slots=2)
    how(sub, worker)
    x = torch.randn(1, 4)
    old = trainer(x)
    with sub.read():
        step(trainer)
        pub.publish()
        assert torch.equal(worker(x), old)
    assert torch.equal(worker(x), trainer(x))


class Decoder(nn.Linear):
    """Counts its calls in a buffer that state_dict() lacks."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("position", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.position += 1
        return super().forward(x) + self.position


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("slots", [1, 3])
@torch.no_grad()
def test_buffers_that_state_dict_lacks_travel_once_and_fill_only_meta_tensors(both, slots, device):
    trainer = Decoder()
    trainer.position.fill_(7)
    with torch.device(device):
        worker = Decoder()
    pub, sub = both(trainer, slots=slots)
    sub.bind(worker)
    first = 7 if device == "meta" else 0
    for version in range(2, 5):
        worker(torch.ones(2))
        trainer.position.fill_(100)
        step(trainer)
        pub.publish()
        assert sub.refresh()
        assert worker.position == first + version - 1
    assert torch.equal(worker.weight, trainer.weight)


def test_gradients_are_warned_about_once_and_right_inside_one_section(bound):
    _, worker, _, sub = bound(lambda: nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="backward"):
        worker(torch.ones(1, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worker(torch.ones(1, 4))
        with sub.read():
            worker(torch.ones(1, 4)).sum().backward()
    assert worker.weight.grad.tolist() == [[1] * 4] * 2


def test_a_bound_module_that_is_dropped_is_collected(bound):
    _, worker, pub, sub = bound(lambda: nn.Linear(2, 2), 2)
    gone = weakref.ref(worker)
    del worker
    gc.collect()
    assert gone() is None
    pub.publish()
    assert sub.refresh()
    assert sub._reader.followers == []
