"""Tensors through the process group."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from ....errors import ProtocolError, WriterDied

_FOR_EVER = timedelta(days=365)
SENDER = 0  # the rank of the sender, unless a message says otherwise


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
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else SENDER


def need_group(instead: str = "") -> None:
    """Raise ProtocolError when there is no process group. `instead`: what would do as well."""
    if not torch.distributed.is_initialized():
        raise ProtocolError(
            "there is no process group; call torch.distributed.init_process_group() first"
            + (f", or give {instead}" if instead else ": it moves the bytes of the weights. Nothing was sent")
        )
