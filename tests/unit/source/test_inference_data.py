"""Tensors made in inference mode that have ordinary memory since, and the other way round, are written into."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmsync import WeightStrategy


def over(tensor, inference):
    """Another tensor over the same memory."""
    with torch.inference_mode(inference):
        return torch.empty(0).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())


def made(inference, strided):
    with torch.inference_mode(inference):
        tensor = torch.zeros(4, 3).t() if strided else torch.zeros(3, 4)
    tensor.data = over(tensor, not inference)
    assert tensor.is_inference() is not inference
    return tensor


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("holder", ["TensorDict", "module"])
def test_they_take_weights(holder, inference, strided):
    target = made(inference, strided)
    if holder == "module":
        destination = nn.Module()
        destination.register_buffer("t", target)
    else:
        destination = TensorDict({"t": target})
    WeightStrategy().apply_weights(destination, {"t": torch.ones(3, 4)})
    assert (target == 1).all()
