"""Conversions of a bound module, and modules made and used in every mode of torch: bound tensors show the arena."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

import shmsync
from support.weights import step

X = torch.randn(3, 4)
with suppress(ImportError):  # some parts of torch use it; its monitor is a thread that stays
    from tqdm import tqdm

    tqdm.monitor_interval = 0
pytestmark = pytest.mark.filterwarnings("ignore:a bound module ran with gradients on")


class Net(nn.Module):
    def __init__(self, recurrent=True):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.GRU(4, 4, batch_first=True) if recurrent else nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.eval()

    def forward(self, x):
        out = self.last(self.norm(self.first(x)).unsqueeze(1))
        return self.tied((out[0] if isinstance(out, tuple) else out).squeeze(1))


MOVING = {
    "half": lambda module: module.half(),
    "to(dtype)": lambda module: module.to(torch.float64),
    "a part": lambda module: module.first.double(),
    "to(device)": lambda module: module.to("meta"),
    "other values": lambda module: module._apply(lambda tensor: tensor * 2),
}
STAYING = {
    "float": lambda module: module.float(),
    "to(device, dtype)": lambda module: module.to("cpu", torch.float32, non_blocking=True),
    "requires_grad_": lambda module: module.requires_grad_(False),
}


def places(module):
    return [(id(tensor), tensor.data_ptr(), tensor.dtype) for tensor in module.state_dict(keep_vars=True).values()]


@torch.no_grad()
def assert_right(trainer, worker, pub):
    for _ in range(2):
        assert torch.equal(worker(X), trainer(X))
        step(trainer)
        pub.publish()
    assert torch.equal(worker(X), trainer(X))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("conversion", MOVING)
def test_what_has_left_the_arena_is_an_error_at_the_next_version(bound, conversion, slots):
    _, worker, pub, sub = bound(Net, slots)
    MOVING[conversion](worker)
    pub.publish()
    for _ in range(2):
        with pytest.raises(shmsync.ProtocolError, match=r"given other memory.*convert the module before bind\(\)"):
            sub.refresh()
        with pytest.raises(shmsync.ProtocolError, match=r"given other memory"):
            worker(X)


def test_a_module_that_was_converted_back_is_bound_again(bound):
    trainer, worker, pub, sub = bound(Net, 1)
    sub.bind(worker.half().float())
    assert_right(trainer, worker, pub)


@pytest.mark.parametrize("conversion", STAYING)
def test_what_changes_nothing_goes_on_working(bound, conversion):
    trainer, worker, pub, _ = bound(Net, 2)
    before = places(worker)
    STAYING[conversion](worker)
    assert places(worker) == before
    assert_right(trainer, worker, pub)


MADE = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("made", MADE)
def test_a_module_that_was_made_in_any_mode(both, made, slots):
    trainer = Net(recurrent=made != "meta")
    with MADE[made]():
        worker = Net(recurrent=made != "meta")
    pub, sub = both(trainer, slots=slots)
    sub.bind(worker)
    for _ in range(2):
        with torch.no_grad():
            out = worker(X)
            torch.testing.assert_close(out, trainer(X))
            torch.testing.assert_close(copy.deepcopy(worker)(X), out)
            step(trainer)
            trainer.norm.running_mean.add_(1)
        pub.publish()


@torch.no_grad()
def test_a_deep_copy_is_private_and_not_guarded(bound):
    trainer, worker, pub, _ = bound(Net, 1)
    twin, expected = copy.deepcopy({"policy": worker})["policy"], trainer(X)
    again = copy.deepcopy(twin)
    step(trainer)
    pub.publish()
    assert torch.equal(twin(X), expected) and torch.equal(again(X), expected)
    twin.load_state_dict(trainer.state_dict())
    assert torch.equal(twin.double()(X.double()), trainer.double()(X.double()))
