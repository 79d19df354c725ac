"""Two batches in memory that the trainer and all workers share: one is read while the other is written."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from tensordict import TensorDict

from ..memory.arena import nested, view
from ..memory.manifest import Key, Manifest
from ..memory.process import refusals
from ..memory.slab import refuse_too_large
from ..memory.torch_modes import run_plainly

BUFFERS = 2
Leaves = dict[Key, tuple[torch.dtype, tuple[int, ...]]]  # of one frame
# What every frame has besides its observations and what the policy returned.
RESULTS: Leaves = {
    ("next", "reward"): (torch.float32, (1,)),
    ("next", "terminated"): (torch.bool, (1,)),
    ("next", "truncated"): (torch.bool, (1,)),
    ("next", "done"): (torch.bool, (1,)),
    ("next", "episode_return"): (torch.float32, (1,)),  # of the episode that ends with this frame, else NaN
    ("policy_version",): (torch.int64, ()),
    ("worker",): (torch.int64, ()),
}


class Buffers:
    """The mapped buffers. `tensors[k]`: buffer k by key, each tensor `[rows, steps, ...]`; a row is an environment.

    `path`: of the memory. Pickled for another process they are mapped there.
    """

    @run_plainly
    def __init__(self, path: str, leaves: Leaves, rows: int, steps: int) -> None:
        self._made_of = path, leaves, rows, steps
        self.steps = steps
        manifest = _manifest(leaves, rows, steps)
        nbytes = BUFFERS * manifest.slot_bytes
        storage = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8).untyped_storage()
        self.tensors: list[dict[Key, torch.Tensor]] = [
            {leaf.key: view(storage, leaf, k * manifest.slot_bytes + leaf.offset) for leaf in manifest.leaves}
            for k in range(BUFFERS)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffers, self._made_of

    def batch(self, buffer: int, rows: slice = slice(None)) -> TensorDict:
        """Rows of a buffer as a TensorDict of batch size [rows, steps], without a copy."""
        tensors = {key: tensor[rows] for key, tensor in self.tensors[buffer].items()}
        batch = nested(tensors)
        batch.batch_size = next(iter(tensors.values())).shape[:2]
        return batch


def create(leaves: Leaves, rows: int, steps: int) -> Buffers:
    """New buffers, which workers can map as long as this object lives.

    Raises NoSpace, before it takes anything, when memory does not suffice.
    """
    nbytes = BUFFERS * _manifest(leaves, rows, steps).slot_bytes
    refuse_too_large(nbytes, f"{BUFFERS} batches of {rows * steps:,} frames", "use a smaller frames_per_batch")
    with refusals("making the buffers of batches"):
        fd = os.memfd_create("shmsync-batches", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            made = Buffers(f"/proc/{os.getpid()}/fd/{fd}", leaves, rows, steps)
        except BaseException:
            os.close(fd)
            raise
    weakref.finalize(made, os.close, fd)
    return made


def _manifest(leaves: Leaves, rows: int, steps: int) -> Manifest:
    meta = {
        key: torch.empty((rows, steps, *shape), dtype=dtype, device="meta") for key, (dtype, shape) in leaves.items()
    }
    return Manifest.of(meta)
