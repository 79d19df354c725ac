"""Two batches in memory that the trainer and all workers share: one is read while the other is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from tensordict import TensorDict

from ..memory.arena import nested, view
from ..memory.manifest import Key, Manifest
from ..memory.plainly import plainly

BUFFERS = 2
Leaves = dict[Key, tuple[torch.dtype, tuple[int, ...]]]  # of one frame


class BufferSpec(NamedTuple):
    """What a worker needs to map the buffers."""

    path: str
    nbytes: int
    leaves: Leaves
    rows: int
    steps: int


class Buffers:
    """The mapped buffers. `tensors[k]`: buffer k by key, each tensor `[rows, steps, ...]`; a row is an environment."""

    @plainly()
    def __init__(self, spec: BufferSpec) -> None:
        self.spec = spec
        manifest = _manifest(spec.leaves, spec.rows, spec.steps)
        storage = torch.from_file(spec.path, shared=True, size=spec.nbytes, dtype=torch.uint8).untyped_storage()
        self.tensors: list[dict[Key, torch.Tensor]] = [
            {
                leaf.key: view(storage, leaf.dtype, leaf.shape, k * manifest.slot_bytes + leaf.offset)
                for leaf in manifest.leaves
            }
            for k in range(BUFFERS)
        ]

    def batch(self, buffer: int, rows: slice = slice(None)) -> TensorDict:
        """Rows of a buffer as a TensorDict of batch size [rows, steps], without a copy."""
        tensors = {key: tensor[rows] for key, tensor in self.tensors[buffer].items()}
        batch = nested(tensors)
        batch.batch_size = next(iter(tensors.values())).shape[:2]
        return batch


def create(leaves: Leaves, rows: int, steps: int) -> tuple[Buffers, int]:
    """New buffers, and the descriptor that keeps them reachable for workers that join."""
    nbytes = BUFFERS * _manifest(leaves, rows, steps).slot_bytes
    fd = os.memfd_create("shmsync-batches", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return Buffers(BufferSpec(f"/proc/{os.getpid()}/fd/{fd}", nbytes, leaves, rows, steps)), fd
    except BaseException:
        os.close(fd)
        raise


def frame(tensors: Mapping[Key, torch.Tensor]) -> Leaves:
    """The layout of one frame, from its tensors."""
    return {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}


def _manifest(leaves: Leaves, rows: int, steps: int) -> Manifest:
    meta = {
        key: torch.empty((rows, steps, *shape), dtype=dtype, device="meta") for key, (dtype, shape) in leaves.items()
    }
    return Manifest.of(meta)
