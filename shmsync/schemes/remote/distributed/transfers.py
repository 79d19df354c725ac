"""Tensors on their way through the process group of torch.distributed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from ....errors import WriterDied

_FOR_EVER = timedelta(days=365)
SENDER = 0  # the rank of the sender, unless a message says otherwise


def isend(tensor: torch.Tensor, rank: int, tag: int) -> Any:
    """Start sending; the caller keeps the tensor until it has arrived."""
    return torch.distributed.isend(tensor, rank, tag=tag)


def wait(works: Iterable[Any], *_buffers: Any) -> None:
    """Until all has been sent or received. No time-out: the process group gives up its connections when a wait of it
    times out, by default after half an hour."""
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
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else SENDER


def tag_of(serial: str) -> int:
    """One for each message: the bytes of one that nobody took must not be taken for those of another."""
    return zlib.crc32(serial.encode()) & 0x7FFFFFFF
