"""The models of the benchmark of the schemes, and a proof that two processes have the same weights."""

from __future__ import annotations

import zlib

import torch
from torch import nn

SIZES: dict[str, tuple[int, int, int]] = {  # layers, and the inputs and outputs of each; a layer has two tensors
    "5k parameters, 6 tensors": (3, 40, 40),
    "5k parameters, 200 tensors": (100, 6, 7),
    "1.6 MB, 200 tensors": (100, 62, 64),
    "1M parameters, 6 tensors": (3, 577, 577),
    "25M parameters, 6 tensors": (3, 2886, 2886),
}


def build(size: str) -> nn.Module:
    layers, inputs, outputs = SIZES[size]
    return nn.Sequential(*(nn.Linear(inputs, outputs) for _ in range(layers))).requires_grad_(False)


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.data for parameter in module.parameters()]


def nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in tensors(module))


def step(module: nn.Module) -> None:
    """What an optimizer does between two sends: every value changes."""
    torch._foreach_add_(tensors(module), 1.0)


def randomize(module: nn.Module) -> None:
    for tensor in tensors(module):
        tensor.uniform_()


def digest(weights: list[torch.Tensor]) -> int:
    """Of every byte, in the order in which the module has them."""
    checksum = 0
    for tensor in weights:
        checksum = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy(), checksum)
    return checksum
