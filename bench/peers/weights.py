"""The weights of the contest, and what a worker computes with them."""

from __future__ import annotations

import torch
from torch import nn

SIZES = {"1 MB in 14 tensors": (1e6, 14), "100 MB in 14 tensors": (1e8, 14), "0.8 MB in 200 tensors": (8e5, 200)}
TINY = {"4 KB in 4 tensors": (4e3, 4)}  # of the tests
FEW_BYTES = 4e6  # up to here one call for all tensors costs less than a call for each

Extremes = tuple[float, float]


def build(size: str) -> nn.ParameterList:
    nbytes, tensors = (SIZES | TINY)[size]
    leaves = (torch.zeros(int(nbytes / 4 / tensors)) for _ in range(tensors))
    return nn.ParameterList(nn.Parameter(leaf, requires_grad=False) for leaf in leaves)


def value(version: int) -> float:
    """Every element of a version has it."""
    return 1.0 + version % 8


def extremes(tensors: list[torch.Tensor]) -> Extremes:
    """The smallest and the largest element. If both are the version's value, all elements are."""
    if len(tensors) * tensors[0].nbytes <= FEW_BYTES:
        tensors = [torch.cat(tensors)]
    pairs = [torch.aminmax(tensor) for tensor in tensors]
    return min(float(low) for low, _ in pairs), max(float(high) for _, high in pairs)
