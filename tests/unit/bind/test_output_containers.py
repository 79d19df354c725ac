"""What a bound module returns holds no view of the weights: it does not change with later versions."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import distributions, nn

SIZE = 4


@dataclasses.dataclass(frozen=True)
class Data:
    held: object


Pair = collections.namedtuple("Pair", ["held", "number"])


@tensorclass
class Tensors:
    held: torch.Tensor


def sac(held):
    transforms = [distributions.AffineTransform(held, 1.0), distributions.TanhTransform(cache_size=1)]
    return distributions.TransformedDistribution(
        distributions.Normal(torch.zeros(SIZE), 1.0), [distributions.ComposeTransform(transforms)]
    )


def mixture(held):
    normal = distributions.Independent(distributions.Normal(held[None].expand(3, SIZE), 1.0), 1)
    return distributions.MixtureSameFamily(distributions.Categorical(torch.ones(3)), normal)


def inverse(held):
    affine = distributions.AffineTransform(held, 1.0)
    return (affine, affine.inv)


def model_output(held):
    reason = "these outputs need transformers, which shmsync[guides] brings"
    outputs = pytest.importorskip("transformers.modeling_outputs", reason=reason)
    return outputs.BaseModelOutput(last_hidden_state=held, hidden_states=(held,))


# How to hold a tensor, and how to see what is held.
HOLDERS = {
    "itself": (lambda h: h, lambda c: c),
    "tuple": (lambda h: (1, [h]), lambda c: c[1][0]),
    "named tuple": (lambda h: Pair(h, 1), lambda c: c.held),
    "dict": (lambda h: {"a": {"b": h}}, lambda c: c["a"]["b"]),
    "ordered dict": (lambda h: collections.OrderedDict(b=1, a=h), lambda c: c["a"]),
    "default dict": (lambda h: collections.defaultdict(list, a=h), lambda c: c["a"]),
    "dataclass": (lambda h: Data([h]), lambda c: c.held[0]),
    "tensordict": (lambda h: TensorDict({"a": {"b": h}}), lambda c: c["a", "b"]),
    "locked tensordict": (lambda h: TensorDict({"a": h}).lock_(), lambda c: c["a"]),
    "tensorclass": (lambda h: Tensors(held=h, batch_size=[]), lambda c: c.held),
    "normal": (lambda h: distributions.Normal(h, 1.0, validate_args=False), lambda c: c.loc),
    "sac in a dict": (lambda h: {"d": sac(h)}, lambda c: c["d"].log_prob(torch.full((SIZE,), 0.5))),
    "mixture": (mixture, lambda c: c.log_prob(torch.ones(SIZE))),
    "inverse": (inverse, lambda c: (c[0](torch.ones(SIZE)), c[0].inv(torch.ones(SIZE)), c[1](torch.ones(SIZE)))),
    "return type": (lambda h: torch.return_types.max((h, h)), lambda c: c.values),
    "model output": (model_output, lambda c: (c.last_hidden_state, c["hidden_states"][0])),
}  # fmt: skip
LEAVES = {
    "parameter": lambda m: m.weight,
    "view": lambda m: m.weight.view(2, 2)[:, 1].repeat(2),
    "buffer": lambda m: m.noise[:],
    "expanded": lambda m: m.scalar.expand(SIZE),
}


class Returns(nn.Module):
    """Returns what `make` makes of it."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 1 + SIZE), requires_grad=False)
        self.scalar = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("noise", torch.rand(SIZE))
        self.make = make

    def forward(self):
        return self.make(self)

    def get(self):
        return self.make(self)


WAYS = {
    "call": lambda module, sub: module(),
    "method": lambda module, sub: module.get(),
    "run": lambda module, sub: sub.run(lambda: module.make(module)),
}
CASES = [(holder, "parameter", "call") for holder in HOLDERS]
CASES += [("itself", leaf, "call") for leaf in LEAVES] + [("dict", leaf, way) for leaf in LEAVES for way in WAYS]
CASES += [("tensordict", "buffer", "run"), ("normal", "expanded", "method"), ("dataclass", "view", "run")]


def seen(value):
    """What the value is now, kept."""
    return [seen(each) for each in value] if isinstance(value, tuple) else value.tolist()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("holder", "leaf", "way"), CASES)
@torch.no_grad()
def test_what_leaves_a_section_does_not_change(holder, leaf, way, slots, bound):
    hold, look = HOLDERS[holder]
    trainer, worker, pub, sub = bound(lambda: Returns(lambda m: hold(LEAVES[leaf](m))), slots)
    found, right = WAYS[way](worker, sub), trainer()
    assert type(found) is (torch.Tensor if holder == "itself" else type(right))
    before = seen(look(found))
    assert before == seen(look(right))
    for _ in range(3):
        for tensor in (trainer.weight, trainer.scalar, trainer.noise):
            tensor.mul_(3).add_(1)
        pub.publish()
        sub.refresh()
    assert seen(look(found)) == before


@pytest.mark.parametrize(
    "run",
    [
        lambda sub: sub.run(lambda: sub.weights),
        lambda sub: sub.run(lambda: [sub.weights])[0],
        lambda sub: sub.run(lambda weights: weights, sub.weights),
    ],
    ids=["weights", "in a list", "an argument"],
)
@torch.no_grad()
def test_run_returns_private_weights(both, run):
    trainer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pub, sub = both(trainer)
    before = trainer[1].weight.tolist()
    kept = run(sub)
    trainer[1].weight.add_(1.0)
    pub.publish()
    sub.refresh()
    assert kept["1", "weight"].tolist() == before and sub.weights["1", "weight"].tolist() != before
    kept["1", "weight"].zero_()


@torch.no_grad()
def test_without_copies_it_is_the_weights(bound):
    _, worker, _, _ = bound(lambda: Returns(lambda m: [m.weight]), clone_outputs=False)
    assert worker()[0] is worker.weight


@torch.no_grad()
def test_the_modules_own_objects_stay_as_they_are(bound):
    def make(module):
        if not hasattr(module, "kept"):
            module.kept, module.names = [module.weight], ["names"]
        return {"a": module.kept, "names": module.names, "module": module}

    _, worker, _, _ = bound(lambda: Returns(make))
    out = worker()
    assert worker.kept[0] is worker.weight and out["a"] is not worker.kept
    assert out["names"] is worker.names and out["module"] is worker
