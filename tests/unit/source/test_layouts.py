"""Weights lie in an arena as they lie in the trainer's memory: channels_last, transposed, permuted in any way."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip
SEEDS = range(8)


def values(rng, shape, dtype):
    count = 1
    for size in shape:
        count *= size
    raw = torch.tensor([rng.randrange(0, 120) for _ in range(count)], dtype=torch.float32).reshape(shape)
    return (raw % 2).to(dtype) if dtype is torch.bool else raw.to(dtype)


def in_some_order(rng, tensor):
    """The same values in another layout: permuted, or with gaps."""
    order = list(range(tensor.dim()))
    rng.shuffle(order)
    way = rng.randrange(4)
    if way == 0:
        return tensor.clone()
    if way in (1, 2) or not tensor.dim():
        return (
            tensor.permute(order)
            .clone(memory_format=torch.contiguous_format)
            .permute([order.index(d) for d in range(tensor.dim())])
        )
    moved = tensor.permute(order)  # with gaps behind each row of the permuted tensor
    room = torch.zeros([*moved.shape[:-1], moved.shape[-1] + 3], dtype=tensor.dtype)
    room[..., : moved.shape[-1]] = moved
    return room[..., : moved.shape[-1]].permute([order.index(d) for d in range(tensor.dim())])


def drawn(rng, dtypes=DTYPES):
    """Weights by key, of random shapes, dtypes and layouts."""
    made = {}
    for number in range(rng.randrange(1, 7)):
        shape = [rng.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(rng.randrange(0, 6))]
        made[f"t{number}"] = in_some_order(rng, values(rng, shape, rng.choice(dtypes)))
    made.setdefault("one", torch.ones(2, 3).t())
    return made


def changed(rng, weights):
    """Other values, each in a separate layout."""
    return {key: in_some_order(rng, values(rng, tensor.shape, tensor.dtype)) for key, tensor in weights.items()}


def alike(weights):
    """Other values, in the same layouts."""
    return {
        key: torch.empty_like(tensor).copy_(tensor[range(len(tensor) - 1, -1, -1)] if tensor.dim() else tensor)
        for key, tensor in weights.items()
    }


def kept(tensor):
    return torch.empty_like(tensor, device="meta").stride() if tensor.numel() else torch.empty(tensor.shape).stride()


def assert_shows(found, weights, like=None):
    """The same values bit for bit; laid out as `like` is."""
    for key, tensor in weights.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape
        assert like is None or found[key].stride() == kept(like[key]), key
        rows = [
            each.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            for each in (found[key], tensor)
            if each.numel()
        ]
        assert not rows or torch.equal(*rows), key


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_any_layout_is_kept_whatever_is_published(both, seed, slots):
    rng = random.Random(seed)
    first = drawn(rng)
    pub, sub = both(first, slots=slots)
    assert_shows(sub.weights, first, first)
    for _ in range(2):  # a plan is made, and found again
        for source in (alike(first), changed(rng, first)):
            pub.publish(source)
            with sub.read():
                assert_shows(sub.weights, source, first)
    now = {**source}
    part = {key: tensor for key, tensor in changed(rng, first).items() if rng.random() < 0.5}
    if part:
        pub.publish(part)
        now |= part
    with sub.read():
        assert_shows(sub.weights, now, first)
    new = changed(rng, first)
    with pub.update() as weights:
        assert_shows(weights, now, first)
        for key, tensor in new.items():
            weights[key].copy_(tensor)
    with sub.read():
        assert_shows(sub.weights, new, first)
    assert_shows(sub.snapshot().weights, new, first)


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


def test_adopted_parameters_keep_their_layout(publisher, subscriber):
    trainer, worker = planes(), planes(False)
    before = {name: tensor.stride() for name, tensor in trainer.state_dict().items()}
    pub = publisher(trainer)
    optimizer = torch.optim.Adam(trainer.parameters(), lr=0.01, fused=True)
    alone = copy.deepcopy(trainer)
    others = torch.optim.Adam(alone.parameters(), lr=0.01, fused=True)
    pub.adopt(trainer, optimizer)
    sub = subscriber(pub)
    sub.bind(worker)
    for _ in range(3):
        x = trainer.inputs()
        for module, each in ((trainer, optimizer), (alone, others)):
            module(x).square().mean().backward()
            each.step()
            each.zero_grad()
        assert {name: tensor.stride() for name, tensor in trainer.state_dict().items()} == before
        assert_equal(trainer, alone)
        assert_equal(worker, alone)
