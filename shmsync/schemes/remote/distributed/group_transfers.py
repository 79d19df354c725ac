"""Tensors through the process group, and the weights with which a rank may begin, which need no store.

The rank asks for its initial weights, and its sender answers with what it has to send at that moment. So a call that
was interrupted, or has given up, leaves nothing behind: a tensor that a process group was given cannot be taken back,
but an answer that was not asked for is not given. The question of a rank that has given up stands; its next call gets
the answer.

A thread waits for the question, or for the answer: one for each rank and process group, whatever becomes of transports.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ....errors import ProtocolError, WriterDied
from ...link.serial_executor import SerialExecutor, Task
from ..packed_weights import PackedWeights, unpack

_QUESTION, _ANSWER = 1, 0  # tags of initial weights
_FOR_EVER = timedelta(days=365)
E = TypeVar("E")
SENDER = 0  # the rank of the sender, unless a message says otherwise


def wait(works: Iterable[Any]) -> None:
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


def need_group(instead: str = "") -> None:
    """Raise ProtocolError when there is no process group. `instead`: what would do as well."""
    if not torch.distributed.is_initialized():
        raise ProtocolError(
            "there is no process group; call torch.distributed.init_process_group() first"
            + (f", or give {instead}" if instead else ": it moves the bytes of the weights. Nothing was sent")
        )


class InitialSender:
    """Sends a rank its first weights when it asks: the sizes, the label, the buffer. See initial_end()."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._executor = SerialExecutor()
        self._offers: list[PackedWeights] = []  # the newest, if a call waits with it
        self._serving: Task | None = None
        self._asked = False

    def send(self, packed_weights: PackedWeights, timeout: float) -> None:
        """Raises TimeoutError when the rank does not ask in time."""
        deadline = time.monotonic() + timeout
        try:
            self._offers[:] = [packed_weights]  # instead of what an interrupted call may have left
            while packed_weights in self._offers or self._serving is not None:
                serving = self._serving = self._serving or self._executor.give(self._serve)
                if not serving.done_by(deadline):
                    raise _late("the worker", timeout)
                self._serving = None
                serving.result()
        finally:
            with contextlib.suppress(ValueError):
                self._offers.remove(packed_weights)

    def _serve(self) -> None:
        """On the executor's thread, where no interrupt comes: wait for the question, and answer it with the offer."""
        if not self._asked:
            receive(torch.empty(1, dtype=torch.uint8, device="cpu"), self._rank, _QUESTION)
            self._asked = True
        try:
            packed_weights = self._offers.pop()
        except IndexError:  # its call has given up; the next one begins with the answer
            return
        self._asked = False
        label = torch.frombuffer(bytearray(pickle.dumps(packed_weights.label)), dtype=torch.uint8)
        sizes = torch.tensor([label.numel(), packed_weights.buffer.nbytes], dtype=torch.int64, device="cpu")
        parts = [part for part in (sizes, label, packed_weights.buffer) if part.numel()]
        wait([torch.distributed.isend(part, self._rank, tag=_ANSWER) for part in parts])


class InitialReceiver:
    """Receives them. See initial_end()."""

    def __init__(self) -> None:
        self._executor = SerialExecutor()
        self._asked: Task | None = None

    def receive(self, timeout: float) -> Any:
        """The weights. Raises TimeoutError when they do not come in time; then the next call goes on waiting."""
        asked = self._asked = self._asked or self._executor.give(_ask)
        if not asked.done_by(time.monotonic() + timeout):
            raise _late("the sender", timeout)
        self._asked = None
        return asked.result()


def _ask() -> Any:
    wait([torch.distributed.isend(torch.zeros(1, dtype=torch.uint8, device="cpu"), SENDER, tag=_QUESTION)])
    sizes = receive(torch.zeros(2, dtype=torch.int64, device="cpu"), SENDER, _ANSWER)
    label = receive(torch.empty(int(sizes[0]), dtype=torch.uint8, device="cpu"), SENDER, _ANSWER)
    buffer = receive(torch.empty(int(sizes[1]), dtype=torch.uint8, device="cpu"), SENDER, _ANSWER)
    return unpack(pickle.loads(bytes(label.numpy())), buffer)


def _late(who: str, timeout: float) -> TimeoutError:
    return TimeoutError(
        f"{who} did not take part in the transfer within {timeout:g} s; call again to go on waiting, or give more with "
        "timeout="
    )


_ends: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()  # by process group and rank


def initial_end(kind: Callable[..., E], *rank: int) -> E:
    """The InitialSender for this rank, or the InitialReceiver of this process, in the process group of now."""
    ends = _ends.setdefault(torch.distributed.group.WORLD, {})
    return ends.get(rank) or ends.setdefault(rank, kind(*rank))
