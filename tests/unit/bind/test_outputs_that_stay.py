"""What a bound module returns leaves its section as it is, and no Python looks at it, unless it may lie in the slab."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from support.calls import own_calls
from support.weights import tensors

FORMS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x, [x, None]],
    "dict": lambda x: {"x": x, "inner": {"y": x, "n": 3, "words": "text", "part": 0.5}},
    "tensordict": lambda x: TensorDict({"x": x, "inner": {"y": x}}, batch_size=[]),
    "tensordicts in a dict": lambda x: {"one": TensorDict({"x": x}, batch_size=[]), "two": (x,)},
}


class Returns(nn.Module):
    """Returns what `form` makes of its result."""

    def __init__(self, form):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.form = form

    def forward(self, x):
        return self.form(self.linear(x))


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_call_runs_no_python_of_ours(form, bound):
    trainer, worker, _, _ = bound(lambda: Returns(FORMS[form]))
    x = torch.randn(3)
    worker(x)
    assert own_calls(lambda: worker(x)) == []
    expected, found = tensors(trainer(x)), tensors(worker(x))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@torch.no_grad()
def test_a_tensordict_that_was_given_is_the_one_that_comes_back(bound):
    trainer, worker, _, _ = bound(lambda: TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"]))
    given = TensorDict({"x": torch.randn(3), "inner": TensorDict({"z": torch.zeros(1)}, batch_size=[])}, batch_size=[])
    expected = trainer(given.clone())["y"]
    worker(given)
    assert own_calls(lambda: worker(given)) == []
    assert worker(given) is given and torch.equal(given["y"], expected)
