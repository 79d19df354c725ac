"""The first GPU as the place of all arenas and new tensors of a test run: SHMSYNC_TEST_DEVICE=cuda."""

from __future__ import annotations

import os
from typing import Any

import torch


class FirstGpu:
    """cuda:0, first used when an arena is: the fork server imports shmsync too, and must not use CUDA.

    Prompt in a publisher, as the simulated device is: a version is published before publish() returns.
    """

    def __init__(self) -> None:
        from shmsync import _native

        self.kind, self.name, self.torch_device = _native.SLAB_CUDA, "cuda:0", torch.device("cuda", 0)
        self.allocated = False

    @property
    def _gpu(self) -> Any:
        from shmsync.memory import cuda

        return cuda.device(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def allocate(self, size: int) -> torch.UntypedStorage:
        self.allocated = True
        return self._gpu.allocate(size)

    def call(self, stream: Any, call: Any) -> None:
        self._gpu.call(stream, call)
        while self.allocated and not self.wait(stream, 1.0):
            pass


def install(devices: Any) -> None:
    """As that of simulated.py."""
    devices.register(FirstGpu(), default=True)
    if os.environ.get("SHMSYNC_TEST_TENSORS") != "host":
        torch.set_default_device("cuda:0")


def settle(_state: object) -> None:
    """As that of simulated.py."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
