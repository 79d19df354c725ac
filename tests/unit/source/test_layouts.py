"""Weights lie in an arena as they lie in the trainer's memory: channels_last, transposed, permuted in any way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

LAYOUTS = {
    "transposed": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    "permuted": lambda tensor: tensor.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "channels_last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "with gaps": lambda tensor: torch.nn.functional.pad(tensor, (0, 3))[..., :-3],
    "in rows": lambda tensor: tensor.contiguous(),
}


def assert_shows(found, expected, strides):
    assert torch.equal(found["t"], expected) and found["t"].stride() == strides


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_layout_is_kept_whatever_is_published(both, layout, slots, dtype):
    plain = (torch.arange(2 * 3 * 4 * 5) % 120).view(2, 3, 4, 5).to(dtype)
    first = LAYOUTS[layout](plain)
    pub, sub = both({"t": first, "one": torch.ones(1, 1)}, slots=slots)
    strides = kept(first)
    assert_shows(sub.weights, plain, strides)
    for other in LAYOUTS.values():
        for _ in range(2):  # a plan is made, and found again
            plain = plain.flip(0)
            pub.publish({"t": other(plain)})
            with sub.read():
                assert_shows(sub.weights, plain, strides)
        plain = plain.flip(1)
        with pub.update() as weights:
            weights["t"].copy_(other(plain))
        with sub.read():
            assert_shows(sub.weights, plain, strides)
    assert_shows(sub.snapshot().weights, plain, strides)


def kept(tensor):
    return torch.empty_like(tensor, device="meta").stride() if tensor.numel() else torch.empty(tensor.shape).stride()


def test_a_trainer_that_comes_back_with_another_layout_is_not_followed(publisher, subscriber):
    first = publisher({"t": torch.ones(2, 3)})
    sub = subscriber(first, follow=True)
    first.close()
    publisher({"t": torch.ones(3, 2).t()}, name=first.name)
    with pytest.warns(RuntimeWarning, match=r"t had the strides \(3, 1\) and has \(1, 2\)"), sub.read() as section:
        assert section.weights["t"].stride() == (3, 1)


# ---- modules


class Planes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 40, 1), nn.ReLU(), nn.Conv2d(40, 5, 3)
        )

    def forward(self, x):
        return self.net(x)

    def inputs(self):
        return torch.randn(3, 4, 9, 9)


def planes(turned=True):
    made = Planes().eval()
    return made.to(memory_format=torch.channels_last) if turned else made


def learn(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.01).add_(0.003)


def assert_equal(worker, trainer):
    for _ in range(3):
        x = trainer.inputs()
        for seen in (x, x.to(memory_format=torch.channels_last) if x.dim() == 4 else x):
            expected = trainer(seen)
            found = worker(seen)
            assert torch.equal(found, expected), (found - expected).abs().max()
            assert found.stride() == expected.stride()


@pytest.mark.parametrize("same_layout", [True, False], ids=["worker lies alike", "worker in rows"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_bound_module_computes_to_the_bit_what_the_trainers_does(both, slots, same_layout):
    torch.manual_seed(0)
    trainer, worker = planes(), planes(same_layout)
    pub, sub = both(trainer, slots=slots)
    sub.bind(worker)
    assert_equal(worker, trainer)
    own = worker.state_dict()
    assert {name: own[name].stride() for name in own} == {name: kept(t) for name, t in trainer.state_dict().items()}
    sources = (
        lambda: trainer,
        trainer.state_dict,
        lambda: {name: tensor.contiguous() for name, tensor in trainer.state_dict().items()},
    )
    for source in sources:
        for _ in range(2):
            learn(trainer)
            pub.publish(source())
            assert_equal(worker, trainer)
    learn(trainer)
    with pub.update() as weights:
        for name, tensor in trainer.state_dict().items():
            weights[tuple(name.split("."))].copy_(tensor)
    assert_equal(worker, trainer)
