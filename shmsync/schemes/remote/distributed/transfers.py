"""Tensors through the process group, and the weights with which a rank may begin."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ....errors import ProtocolError, WriterDied
from ..background import Clerk, Task
from ..parcel import Parcel, unpack
from . import mailbox

_FOR_EVER = timedelta(days=365)
_SENDER = 0  # the rank of the sender, unless a message says otherwise


def wait(works: Iterable[Any], *_buffers: Any) -> None:
    """Wait until all has been sent or received, without a time-out.

    The process group gives up its connections when a wait of it times out, by default after half an hour.
    """
    for work in works:
        work.wait(_FOR_EVER)


def receive(tensor: torch.Tensor, rank: int, tag: int) -> torch.Tensor:
    """Fill a tensor. Raises WriterDied when the sender is gone."""
    if tensor.numel():
        try:
            work = torch.distributed.irecv(tensor, rank, tag=tag)
            assert work is not None, "this process is not in the process group"
            wait([work])
        except RuntimeError as error:
            raise WriterDied(f"the sender is gone in the middle of a transfer: {str(error)[:200]}") from error
    return tensor


def my_rank() -> int:
    """Of this process."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else _SENDER


def need_group(instead: str = "") -> None:
    """Raise ProtocolError when there is no process group. `instead`: what would do as well."""
    if not torch.distributed.is_initialized():
        raise ProtocolError(
            "there is no process group; call torch.distributed.init_process_group() first"
            + (f", or give {instead}" if instead else ": it moves the bytes of the weights. Nothing was sent")
        )


class InitialSender:
    """Sends a rank its first weights without the store: the sizes, the label, the buffer."""

    def __init__(self, clerk: Clerk) -> None:
        self._clerk = clerk

    def send(self, parcel: Parcel, rank: int, timeout: float) -> None:
        """Raises TimeoutError when the rank does not receive in time."""
        label = torch.frombuffer(bytearray(mailbox.to_text(parcel.label).encode()), dtype=torch.uint8)
        sizes = torch.tensor([label.numel(), parcel.buffer.nbytes], dtype=torch.int64, device="cpu")
        parts = [part for part in (sizes, label, parcel.buffer) if part.numel()]
        works = [torch.distributed.isend(part, rank, tag=0) for part in parts]
        # The task keeps the buffers: the transfer goes on when this call has given up.
        _finish(self._clerk.give(partial(wait, works, parts, parcel)), "the worker", timeout)


class InitialReceiver:
    """Receives them."""

    def __init__(self, clerk: Clerk) -> None:
        self._clerk = clerk
        self._asked: Task | None = None

    def receive(self, timeout: float) -> Any:
        """The weights. Raises TimeoutError when they do not come in time; then the next call goes on waiting."""
        asked = self._asked = self._asked or self._clerk.give(_receive_initial)
        try:
            return _finish(asked, "the sender", timeout)
        finally:
            if asked.done():
                self._asked = None


def _receive_initial() -> Any:
    sizes = receive(torch.zeros(2, dtype=torch.int64, device="cpu"), _SENDER, 0)
    label = receive(torch.empty(int(sizes[0]), dtype=torch.uint8, device="cpu"), _SENDER, 0)
    buffer = receive(torch.empty(int(sizes[1]), dtype=torch.uint8, device="cpu"), _SENDER, 0)
    return unpack(mailbox.from_text(bytes(label.numpy()).decode()), buffer)


def _finish(task: Task, who: str, timeout: float) -> Any:
    if not task.done_by(time.monotonic() + timeout):
        raise TimeoutError(
            f"{who} did not take part in the transfer within {timeout:g} s; call again to go on waiting, or give more "
            "with timeout="
        )
    return task.result()
