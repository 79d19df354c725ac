"""Bound modules: identity, versions, buffers, outputs, copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from support.weights import step


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.log_std = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        mean = self.body(x)
        return mean, self.log_std.expand_as(mean)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("consistency", ["pinned", "optimistic", "live"])
@torch.no_grad()
def test_each_forward_uses_the_newest_version(bound, slots, consistency):
    trainer, worker, pub, _ = bound(lambda: nn.Linear(4, 2), slots, consistency)
    x = torch.randn(5, 4)
    for _ in range(5):
        assert torch.equal(worker(x), trainer(x))
        step(trainer)
        assert not torch.equal(worker(x), trainer(x))
        pub.publish()


@torch.no_grad()
def test_parameters_keep_their_identity(bound):
    trainer, worker, pub, sub = bound(lambda: nn.LSTM(3, 5), 2)
    ids = [id(p) for p in worker.parameters()]
    for _ in range(3):
        step(trainer)
        pub.publish()
        sub.refresh()
        x = torch.randn(2, 1, 3)
        torch.testing.assert_close(worker(x)[0], trainer(x)[0])
    assert [id(p) for p in worker.parameters()] == ids


@torch.no_grad()
def test_outer_sections_hold_one_version_for_a_rollout(bound):
    trainer, worker, pub, sub = bound(lambda: nn.Linear(4, 2), 2)
    x = torch.randn(1, 4)
    old = trainer(x)
    with sub.read():
        step(trainer)
        pub.publish()
        assert torch.equal(worker(x), old)
    assert torch.equal(worker(x), trainer(x))


@torch.no_grad()
def test_outputs_that_are_views_of_the_weights_are_cloned(bound):
    trainer, worker, pub, _ = bound(Policy)
    _, stored = worker(torch.zeros(2, 4))
    step(trainer)
    pub.publish()
    worker(torch.zeros(2, 4))
    assert stored.abs().sum() == 0


@torch.no_grad()
def test_outputs_stay_views_when_asked(bound):
    trainer, worker, pub, sub = bound(Policy, clone_outputs=False)
    _, stored = worker(torch.zeros(2, 4))
    step(trainer)
    pub.publish()
    sub.refresh()
    assert stored.sum() == 6


@torch.no_grad()
def test_buffers_are_private_and_refreshed_with_each_version(bound):
    trainer, worker, pub, sub = bound(lambda: nn.BatchNorm1d(3))
    worker.train()
    worker(torch.randn(8, 3) + 5)  # writes running statistics
    assert trainer.running_mean.abs().sum() == 0
    trainer.running_mean.fill_(2)
    pub.publish()
    sub.refresh()
    assert worker.running_mean.tolist() == [2, 2, 2]
    assert sub.weights["running_mean"].data_ptr() != worker.running_mean.data_ptr()


@torch.no_grad()
def test_buffers_can_be_views(bound):
    _, worker, _, sub = bound(lambda: nn.BatchNorm1d(3), buffers="view")
    assert worker.running_mean.data_ptr() == sub.weights["running_mean"].data_ptr()


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


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@torch.no_grad()
def test_copies_of_a_bound_module_are_private(bound, how):
    trainer, worker, pub, _ = bound(Policy)
    if how == "deepcopy":
        twin = copy.deepcopy(worker)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(worker))
    else:
        file = io.BytesIO()
        torch.save(worker, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    x = torch.randn(2, 4)
    expected = trainer(x)[0]
    step(trainer)
    pub.publish()
    assert torch.equal(twin(x)[0], expected)
    twin.log_std.add_(1)  # its own memory, writable
    assert torch.equal(worker(x)[0], trainer(x)[0])


@torch.no_grad()
def test_a_state_dict_of_a_bound_module_loads_elsewhere(bound):
    trainer, worker, _, _ = bound(Policy)
    other = Policy()
    other.load_state_dict(worker.state_dict())
    assert torch.equal(other.body.weight, trainer.body.weight)


@torch.no_grad()
def test_an_interrupt_in_the_forward_leaks_no_pin(bound):
    class Interrupted(nn.Linear):
        raises = False

        def forward(self, x):
            if self.raises:
                raise KeyboardInterrupt
            return super().forward(x)

    _, worker, pub, _ = bound(lambda: Interrupted(2, 2))
    worker.raises = True
    with pytest.raises(KeyboardInterrupt):
        worker(torch.ones(1, 2))
    assert pub.readers()[0].pinned is None
    pub.publish()


def test_a_bound_module_that_is_dropped_is_collected(bound):
    _, worker, pub, sub = bound(lambda: nn.Linear(2, 2), 2)
    gone = weakref.ref(worker)
    del worker
    gc.collect()
    assert gone() is None
    pub.publish()
    assert sub.refresh()
    assert sub._reader.followers == []
