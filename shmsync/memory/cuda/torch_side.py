"""What torch knows of GPUs: the current stream, the current device, and storages over memory that is not its own."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ..torch_modes import plainly
from .blocks import Block


class TorchSide:
    """What is asked of torch.cuda. Tests put another object in its place, which needs no GPU."""

    def count(self) -> int:
        """How many GPUs this process sees."""
        return torch.cuda.device_count()

    def on(self, index: int) -> AbstractContextManager[object]:
        """This GPU is the calling thread's current one. No context is made on another."""
        return torch.cuda.device(index)

    def current(self, index: int) -> int:
        """The handle of the calling thread's current stream on this GPU."""
        return torch.cuda.current_stream(index).cuda_stream

    def wrap(self, memory: Block, index: int) -> torch.UntypedStorage:
        """A storage over this memory. torch keeps the block until the last tensor over it is gone."""
        with plainly():
            return torch.as_tensor(memory, device=torch.device("cuda", index)).untyped_storage()

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the GPU that the tensor lies on; None: it lies elsewhere."""
        return tensor.device.index if tensor.device.type == "cuda" else None

    def cached(self, index: int) -> int:
        """Bytes of this GPU that torch's allocator keeps, and no tensor uses."""
        return torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
