"""Weights through the pipe: a private copy for every worker. The simplest scheme, and the slowest.

A send pickles the weights once for all workers, and posts the message to each (links.py). Large weights lie beside the
message in a sealed memfd, which the worker opens and the message unpickles from, so that no pipe ever fills. That needs
a worker that can open what this process has: its answers say so, and until the first one weights go by value.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ..engine.deadlines import timeout_or_default
from ..engine.source.dtypes import Dtypes
from ..engine.source.leaf_check import problem_with
from ..errors import ShmSyncError
from ..memory.devices import laid_out
from ..memory.manifest import Strides, contiguous, layout_of
from ..memory.process import me
from ..memory.slab import MemfdAt, Sealed, pieces_at, reachable
from ..memory.torch_modes import run_plainly
from . import messages
from .api import WeightSyncScheme
from .links import Link
from .messages import Message, Tag, Tagged, framed
from .pipe_transport import PipeTransport
from .receiver import PipeReceiver
from .sender import PipeSender, Posted
from .strategy import Form, leaves_of, refuse_odd

LARGE = 1 << 20  # bytes from which on weights travel beside the message; see docs/performance.md
_APART = 4096  # bytes of a tensor from which on it lies beside the others in the memfd


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights are copied through a pipe to each worker, which applies them at its receive().

    Args:
        strategy: the form in which weights travel, "state_dict" or "tensordict".
        timeout: default of a send, in seconds; math.inf waits without limit, None is 10.
        partial: see WeightSyncScheme.
        dtype: see WeightSyncScheme.

    Weights on a device are fetched once, and each worker copies them to where its module lies.
    """

    def __init__(
        self,
        strategy: Form = "state_dict",
        *,
        timeout: float | None = None,
        partial: bool = False,
        dtype: Dtypes = None,
    ) -> None:
        super().__init__(strategy, partial=partial, dtype=dtype)
        self.timeout = timeout_or_default(timeout)

    @override
    def create_transport(self, pipe_or_context: Any) -> MPTransport:
        return MPTransport(getattr(pipe_or_context, "pipe", pipe_or_context), self.timeout)

    @override
    def create_sender(self) -> MultiProcessSender:
        return MultiProcessSender(self)

    @override
    def create_receiver(self) -> MultiProcessReceiver:
        return MultiProcessReceiver(self)


class MultiProcessSender(PipeSender):
    """Sends weights through the pipes."""

    _scheme: MultiProcessWeightSyncScheme

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self._newest: WeightsMessage | None = None  # what resend() brings
        self._in_use: list[tuple[Link, WeightsMessage]] = []  # unanswered, in memory of this process

    @override
    def _write(self, source: Any, links: Mapping[int, Link], deadline: float) -> None:
        leaves, _ = leaves_of(source)
        refuse_odd(leaves)
        self._in_use = [each for each in self._in_use if each[1].tag in each[0].unanswered and not each[0].reported]
        size = sum(leaf.nbytes for leaf in leaves.values())
        tag = self._model_id, self._next_version(links, self._version)
        self._newest = WeightsMessage(tag, source, apart=size >= LARGE and any(map(_reaches, links.values())))
        self._version = tag[1]

    @override
    def _announce(self, links: Mapping[int, Link], *, again: bool = False) -> Posted:
        if self._newest is None or (again and self._scheme.partial):  # all that is known, not the newest part of it
            self._write(self._source(None), links, math.inf)
        message = self._newest
        assert message is not None
        for link in links.values():
            # Never two messages that lead to memory of this process, so a late worker holds up one.
            if (
                message.sealed is not None
                and _reaches(link)
                and not any(tag[0] == self._model_id for tag in link.unanswered)
            ):
                self._in_use.append((link, message))
                link.post(message.reference, message.tag)
            else:
                link.post(message.by_value(), message.tag)
        return Posted(self._version, links, dict.fromkeys(links, message.tag))


def _reaches(link: Link) -> bool:
    """Can the worker open memory of this process? It can where this one can open the worker's: no other container."""
    return link.owner != 0 and _reachable(link.owner)


_reachable = functools.lru_cache(maxsize=1024)(reachable)


class WeightsMessage:
    """A message with weights, framed; read from its source when it is made.

    Args:
        tag: which version it is.
        weights: a TensorDict or a dict.
        apart: are they to travel beside the message, if there is memory for that?
    """

    def __init__(self, tag: Tag, weights: Any, *, apart: bool = False) -> None:
        self.tag = tag
        self.sealed: Sealed | None = None
        if apart:
            pieces: list[memoryview] = []
            head = _pickled(weights, pieces)
            try:
                self.sealed = Sealed(pieces)
            except ShmSyncError:
                pass  # no descriptor or memory for it: as bytes it needs less at once
            else:
                self._apart = Apart(head, self.sealed.place, self.sealed.spans)
                self.reference = self._framed(self._apart)  # says where they are
        self._by_value = self._framed(weights) if self.sealed is None else None

    def by_value(self) -> bytes:
        """The message that holds them."""
        if self._by_value is None:
            self._by_value = self._framed(self._apart.read())
        return self._by_value

    def _framed(self, weights: Any) -> bytes:
        return framed(_pickled(Tagged(((self.tag[0], weights), messages.UPDATE), self.tag, me().owner)))


class Apart:
    """Weights that lie in a sealed memfd of another process."""

    def __init__(self, head: bytes, place: MemfdAt, spans: list[tuple[int, int]]) -> None:
        self._content = head, place, spans

    def read(self) -> Any:
        """The weights: a private copy, once they are changed. Raises WriterDied when they are gone, and NoSpace."""
        head, place, spans = self._content
        return pickle.loads(head, buffers=pieces_at(place, spans))

    @staticmethod
    def read_by_recv(*content: Any) -> Any:
        """The weights. Raises as read()."""
        return Apart(*content).read()

    def __reduce__(self) -> tuple[Any, ...]:
        return Apart.read_by_recv, self._content


@run_plainly
def _pickled(message: object, pieces: list[memoryview] | None = None) -> bytes:
    """Pickle a message with the values of its tensors, which stay where they are: multiprocessing would move them.

    `pieces`: gets views of the memory of tensors of 4 KB or more, which then lie beside the pickle.
    """

    def inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _APART:
            assert pieces is not None
            pieces.append(raw)
        return raw.nbytes < _APART

    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5, buffer_callback=None if pieces is None else inside).dump(message)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) in (torch.Tensor, nn.Parameter)
            and problem_with(obj) is None
            and not (obj.is_conj() or obj.is_neg())
        ):
            strides = layout_of(obj)
            obj = laid_out(obj.detach().cpu(), strides)
            data = obj.as_strided((obj.numel(),), (1,)).view(torch.uint8).numpy() if obj.numel() else b""
            permuted = () if strides == contiguous(obj.shape) else (strides,)
            return _tensor, (pickle.PickleBuffer(data), obj.dtype, tuple(obj.shape), *permuted)
        return NotImplemented


@run_plainly
def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: Strides | None = None) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, contiguous(shape) if strides is None else strides)


class MPTransport(PipeTransport):
    """Weights through one pipe, in either direction; see PipeTransport.

    Args:
        pipe_connection: one end of a duplex multiprocessing.Pipe; None makes a transport without a worker.
        timeout: seconds to wait for an answer; math.inf waits without limit, None is 10.
    """

    def __init__(self, pipe_connection: Any, timeout: float | None = 10.0) -> None:
        super().__init__(MultiProcessWeightSyncScheme(timeout=timeout), pipe_connection)

    @override
    def _content(self, message: Message) -> Any:
        if message.kind == messages.REGISTER:
            raise ValueError(f"{message.model_id!r} is registered in shared memory; use one scheme on both sides")
        return message.content.read() if isinstance(message.content, Apart) else message.content


class MultiProcessReceiver(PipeReceiver):
    """Copies weights that came through the pipe into the model."""

    _scheme: MultiProcessWeightSyncScheme

    @override
    def _use(self, message: Message) -> None:
        self._strategy.apply_weights(self._resolve_model_ref(), self._transport._content(message))
        if message.tag is not None:
            self._version = message.tag[1]
