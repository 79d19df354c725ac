"""Tensors on their way through the process group of torch.distributed."""

from __future__ import annotations

import threading
import time
import zlib
from typing import Any

import torch

from ...errors import WriterDied

SENDER = 0  # the rank of the sender, unless a message says otherwise


class Transfer:
    """One tensor on its way. A thread waits for it: the process group gives up its connections when a wait of it
    times out."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # the process group does not keep it
        self._error: BaseException | None = None
        self._done = threading.Event()
        if work is None:
            self._done.set()
        else:
            threading.Thread(target=self._wait, args=(work,), daemon=True, name="shmsync transfer").start()

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except BaseException as error:
            self._error = error
        self._done.set()

    def done_by(self, deadline: float) -> bool:
        """Wait for it."""
        return self._done.wait(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))

    def check(self, who: str) -> None:
        """Raise WriterDied if it failed."""
        if self._error is not None:
            raise WriterDied(f"{who} is gone in the middle of a transfer: {str(self._error)[:200]}") from self._error

    def wait(self, deadline: float, who: str) -> None:
        """Both; TimeoutError when the time is over."""
        if not self.done_by(deadline):
            raise TimeoutError(f"{who} did not take part in the transfer in time; give more with timeout=")
        self.check(who)


def isend(tensor: torch.Tensor, rank: int, tag: int) -> Any:
    return torch.distributed.isend(tensor, rank, tag=tag)


def irecv(tensor: torch.Tensor, rank: int, tag: int) -> Any:
    return torch.distributed.irecv(tensor, rank, tag=tag)


def received(tensor: torch.Tensor, deadline: float) -> torch.Tensor:
    Transfer(irecv(tensor, SENDER, 0), tensor).wait(deadline, "the sender")
    return tensor


def my_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else SENDER


def tag_of(stamp: Any) -> int:
    """One for each model: messages of two models may be under way to one rank."""
    return zlib.crc32(stamp[1].encode()) & 0x7FFFFFFF
