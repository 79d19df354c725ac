"""What torch knows of GPUs: the current stream, the current device, and storages over memory that is not its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..torch_modes import plainly


class Exposed(Protocol):
    """Memory that says where it is, and lives while it is referenced."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, size and type."""


class TorchSide(Protocol):
    """What is asked of torch, so that tests can answer without a GPU."""

    def count(self) -> int:
        """How many GPUs this process sees."""

    def on(self, index: int) -> AbstractContextManager[object]:
        """This GPU is the calling thread's current one. No context is made on another."""

    def current(self, index: int) -> int:
        """The handle of the calling thread's current stream on this GPU."""

    def wrap(self, memory: Exposed, index: int) -> torch.UntypedStorage:
        """A storage over this memory, which it keeps."""

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the GPU that the tensor lies on; None: it lies elsewhere."""

    def cached(self, index: int) -> int:
        """Bytes of this GPU that torch's allocator keeps, and no tensor uses."""


class Torch:
    """torch.cuda."""

    def count(self) -> int:
        """As in TorchSide."""
        return torch.cuda.device_count()

    def on(self, index: int) -> AbstractContextManager[object]:
        """As in TorchSide."""
        return torch.cuda.device(index)

    def current(self, index: int) -> int:
        """As in TorchSide."""
        return torch.cuda.current_stream(index).cuda_stream

    def wrap(self, memory: Exposed, index: int) -> torch.UntypedStorage:
        """As in TorchSide. torch keeps an object that exposes its memory until the last tensor over it is gone."""
        with plainly():
            return torch.as_tensor(memory, device=torch.device("cuda", index)).untyped_storage()

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """As in TorchSide."""
        return tensor.device.index if tensor.device.type == "cuda" else None

    def cached(self, index: int) -> int:
        """As in TorchSide."""
        return torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
