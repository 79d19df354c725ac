"""Weights for the ranks of torch.distributed. The process group moves the bytes, a store announces and answers.

A send to a rank is one isend() of one flat buffer, then two keys of the store: `NODE_{rank}_in_label`, which says what
the buffer is, and `NODE_{rank}_in` = "update_weights", for loops that look for it. The rank receives, applies, and sets
`NODE_{rank}_out_version` and `NODE_{rank}_out` = "updated". The sender polls for that key, for all ranks of a send.

Facts that shape this file:
- A client of a TCPStore is locked while it waits, and each wait() that times out prints warnings. check() costs 23 µs.
- isend() keeps the buffer only as long as its work object lives, and work.is_completed() stays False. A wait() that
  times out closes the connection to the rank. So nobody waits for an isend(): the work is kept until the answer, which
  proves arrival.
- isend() to a rank whose process has died raises at once, within milliseconds of the death. Nothing else tells, so a
  send that waits for an answer probes the rank, less often with time.

INV: a message's bytes have a tag that no other message of this process has, and its label names that tag. So bytes of
one version never arrive under the label of another, whatever was given up in between. The tags are large: those of a
program's own send() and recv(), and of a TensorDict's, are small.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import override

from ...engine.deadlines import deadline_after, timeout_or_none
from ...engine.outcome import Failure
from ...errors import WriterDied
from ...memory.manifest import Manifest
from ..context import Arguments
from ..receiver import WeightReceiver
from ..strategy import WeightStrategy
from .base import Dead, Failed, RemoteScheme, RemoteTransport
from .nodes import NodeFanOut
from .packing import Label, News, PackedWeights, unpack
from .receiver import RemoteReceiver

_log = logging.getLogger("shmsync")

UPDATE, UPDATED, FAILED = "update_weights", "updated", "failed"
_FASTEST, _SLOWEST = 0.0002, 0.005  # seconds between two looks into a store
_FIRST_PROBE, _YEAR = 0.025, 3e7  # seconds
_INITIAL = 1 << 30  # the tag of initial weights; a program's own messages have small tags
_tags = itertools.count(_INITIAL + 1)
_kept: dict[tuple[int, int], Any] = {}  # works and weights of messages without an answer, by rank and tag


class DistributedWeightSyncScheme(RemoteScheme):
    """Sends each rank of torch.distributed, or with fan_out="node" each node, one flat buffer; receive() applies it.

    Args:
        backend: "gloo", the one that is supported; init_process_group() is called by the user.
        sync: kept for code that has it; both ways end by the deadline.
        **options: strategy=, fan_out=, timeout= and the others of RemoteScheme.

    init_on_sender() takes `store`, which all ranks use (else the default process group's); `ranks`, or `num_workers`
    for the ranks 1 to num_workers (else every rank but this one); `model` (or `source_model`). init_on_worker() takes
    `store` and `rank` (else the default process group's) and `model`. Each may be an argument or come from the context,
    which is held weakly. Both raise ValueError without a process group when one is needed.
    """

    make_fan_out = NodeFanOut

    def __init__(self, backend: str = "gloo", sync: bool = True, **options: Any) -> None:
        super().__init__(**options)
        if backend != "gloo":
            raise ValueError(f'backend is "gloo", not {backend!r}; weights on a GPU are fetched before they are sent')
        self.backend = backend
        self.sync = sync

    @override
    def create_transport(self, pipe_or_context: Any = None) -> DistributedTransport:
        """The transport to a rank, given as (store, rank)."""
        store, rank = pipe_or_context or (None, None)
        return DistributedTransport(store, rank, self.sync, timeout=self.timeout)

    @override
    def create_receiver(self) -> DistributedReceiver:
        return DistributedReceiver(self)

    @override
    def workers(self, arguments: Arguments) -> list[tuple[Any, int]]:
        ranks: Sequence[int] | None = arguments.get("ranks")
        if ranks is None:
            count = arguments.check_count(None, "ranks", "num_workers", "num_collectors")
            if count is not None:
                ranks = range(1, count + 1)
            else:
                ranks = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        store = store_of(arguments)
        return [(store, rank) for rank in ranks]


def store_of(arguments: Arguments) -> Any:
    """The store for a model: each model but "policy" has its own keys."""
    store = arguments.get("store")
    if store is None:
        store = dist.PrefixStore("shmsync", dist.distributed_c10d._get_default_store())
    return store if arguments.model_id == "policy" else dist.PrefixStore(arguments.model_id, store)


def poll(ready: Callable[[], bool], deadline: float) -> bool:
    """Look until `ready()` is true, less often with time; False at the monotonic time `deadline`."""
    began = time.monotonic()
    while not ready():
        now = time.monotonic()
        if now >= deadline:
            return False
        time.sleep(max(0.0, min(_FASTEST + (now - began) / 20, _SLOWEST, deadline - now)))
    return True


# ---- the sender's side


class Message(NamedTuple):
    """What a label key has."""

    tag: int
    source: int  # the sender's rank
    content: Label | News | None
    manifest: Manifest | None  # of the weights that come by isend(), whose Label this is
    call: tuple[Any, ...] | None  # (function, arguments): answer what it returns; None: apply the content


class RankRequest:
    """A message to a rank, as a future of its answer."""

    def __init__(self, store: Any, rank: int, content: Any, call: tuple[Any, ...] | None = None) -> None:
        tag, source, manifest = next(_tags), 0, None
        self._store, self._key, self._out = store, (rank, tag), f"NODE_{rank}_out"
        self._end: tuple[str, Any] | Dead | None = None  # what it answered, or how it died
        self._began = self._probed = time.monotonic()
        if isinstance(content, PackedWeights):
            source = dist.get_rank()
            _kept[self._key] = isend(content.buffer, rank, tag), content  # nobody else gets the buffer meanwhile
            content, manifest = content.label, content.manifest
        message = Message(tag, source, content, manifest, call)
        try:
            store.set(f"NODE_{rank}_in_label", pickle.dumps(message))
            store.set(f"NODE_{rank}_in", UPDATE)
        except dist.DistError as error:
            raise Dead(lost(error)) from error

    def done(self) -> bool:
        """Take the answer, if it is there; now and then, less often with time, also find out whether the rank died."""
        if self._end is None:
            dead, now = None, time.monotonic()
            if now - self._probed >= max(_FIRST_PROBE, self._probed - self._began):
                self._probed = now
                try:
                    if dist.is_initialized():
                        isend(torch.empty(0), self._key[0], next(_tags))  # nobody receives this tag
                except Dead as error:
                    dead = error
            try:
                self._end = self._answer() or dead  # it may have answered, and then died
            except dist.DistError as error:
                self._end = Dead(lost(error))
        return self._end is not None

    def _answer(self) -> tuple[str, Any] | None:
        if not self._store.check([self._out]):
            return None
        word, beside = self._store.get(self._out).decode(), f"{self._out}_version"
        tag, content = None, None
        if self._store.check([beside]):  # a loop of the user's own may set the word alone
            tag, content = pickle.loads(self._store.get(beside))
            self._store.delete_key(beside)
        self._store.delete_key(self._out)
        return (word, content) if tag in (None, self._key[1]) else None

    def result(self) -> Any:
        """The answer, once it is done. Raises Dead, Failed."""
        _kept.pop(self._key, None)
        if isinstance(self._end, Dead):
            raise self._end
        word, content = self._end  # type: ignore[misc]  # after done()
        if word == FAILED and isinstance(content, Failure):
            raise Failed(content)
        if word != UPDATED:
            raise Failed(f"it answered {word!r} instead of {UPDATED!r}")
        _kept.pop((self._key[0], _INITIAL), None)  # a rank takes them before it takes messages
        return content


def isend(tensor: torch.Tensor, rank: int, tag: int) -> Any:
    """Begin to send; the work. Raises Dead when the rank's connection is closed."""
    try:
        return dist.isend(tensor, rank, tag=tag)
    except RuntimeError as error:
        raise Dead(f"gloo: {error}") from error


def lost(error: Exception) -> str:
    """How a store that cannot be reached reads in an error."""
    return f"the store cannot be reached: {str(error)[:200]}"


# ---- the worker's side


def receive(size: int, source: int, tag: int, timeout: float, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """So many bytes of this tag. Raises WriterDied when the sender is gone, or does not send them in time."""
    if buffer is None or buffer.nbytes != size:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        try:
            work: Any = dist.irecv(buffer, source, tag=tag)
            work.wait(timedelta(seconds=min(timeout, _YEAR)))
        except RuntimeError as error:
            raise WriterDied(
                f"the sender (rank {source}) died in the middle of a transfer, or did not send within {timeout} s, and "
                f"gloo has closed the connection: {str(error)[:200]}"
            ) from error
    return buffer


class DistributedReceiver(RemoteReceiver):
    """Applies what has come at receive(), on the thread that calls it."""

    _transport: DistributedTransport

    @override
    def _connect(self, arguments: Arguments) -> None:
        rank = arguments.get("rank")
        if rank is None:
            rank = dist.get_rank()
        self._register_worker_transport((store_of(arguments), rank))
        self._transport.uses_one_buffer = True

    @override
    def receive(self, timeout: float | None = 0.001) -> bool:
        """Apply what has arrived, within `timeout` seconds (None: the scheme's), and answer it. Was there news?

        Weights that cannot be applied raise in the sender; the model keeps what it had. Raises WriterDied when the
        sender dies in the middle of a transfer, ValueError without a model.
        """
        self._scheme.check_open("receive")
        timeout = timeout_or_none(timeout)
        try:
            return WeightReceiver.receive(self, timeout)
        except WriterDied:
            raise
        except Exception as error:
            self._resolve_model_ref()  # a receiver without a model raises here too
            _log.warning("weights of %r were refused: %s", self._model_id, error)
            return False

    @override
    def apply_weights(self, weights: Any) -> None:
        """Apply what `transport.receive_weights()` gave, and answer the sender."""
        try:
            super().apply_weights(weights)
        except Exception as error:
            if self._transport is not None:
                self._transport.send_failure(error)
            raise
        if self._transport is not None:
            self._transport.send_ack()


# ---- the API's transport, which has both sides


class DistributedTransport(RemoteTransport):
    """Reaches one rank; in that rank's process, reaches the sender.

    Args:
        store: a store that both processes use. None: every call does nothing.
        rank: the worker's. None: every call does nothing.
        sync: kept for code that has it; both ways end by the deadline.
        weights_buffer: a TensorDict that receive_weights() fills; None: it makes new tensors.
        timeout: seconds that a send waits, and that a transfer may take; math.inf waits without limit, None is 60.

    The default process group of torch.distributed (gloo) moves the tensors.
    """

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        sync: bool = True,
        *,
        weights_buffer: Any = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(timeout)
        self.store, self.rank, self.sync, self.weights_buffer = store, rank, sync, weights_buffer
        self.uses_one_buffer = False  # the weights of one receive_weights() are overwritten by the next
        self._buffer: torch.Tensor | None = None
        self._taken: Message | None = None  # what send_ack() answers

    @property
    @override
    def connected(self) -> bool:
        return self.store is not None and self.rank is not None

    @override
    def check_connection(self) -> bool:
        """Is there a process group in this process?"""
        return bool(dist.is_initialized())

    def setup_connection_and_weights_on_sender(self) -> None:
        """Nothing: init_process_group() has made the connection."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int | None = None, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> None:
        """Nothing: init_process_group() has made the connection."""

    @override
    def start(self, content: Any, call: tuple[Any, ...] | None = None) -> RankRequest:
        return RankRequest(self.store, self.rank, content, call)  # type: ignore[arg-type]

    def call(self, function: Callable[..., Any], content: Any = None, *args: Any) -> RankRequest:
        """Let the rank's receive() call function(content, *args), and answer what that returns."""
        return self.start(content, (function, *args))

    @staticmethod
    @override
    def wait(requests: Sequence[Any], seconds: float) -> None:
        poll(lambda: any(request.done() for request in requests), time.monotonic() + seconds)

    def send_initial_weights(self, weights: Any) -> None:
        """Send weights without the store, to a worker that calls receive_initial_weights(). Does not wait for it.

        Their bytes are kept until the rank has answered a message. Raises ValueError without a process group,
        RuntimeError when the rank is dead.
        """
        if self.rank is None:
            return
        whole = bytearray(pickle.dumps(self._packer.pack(weights, "policy", 0)))
        parts = [torch.tensor([len(whole)], device="cpu"), torch.frombuffer(whole, dtype=torch.uint8)]
        works = [dist.isend(part, self.rank, tag=_INITIAL) for part in parts]
        _kept.setdefault((self.rank, _INITIAL), []).append((works, parts))

    def receive_initial_weights(self) -> Any:
        """What rank 0 sends with send_initial_weights(); None without a rank. Does not use the store.

        Raises WriterDied when they do not come within the transport's timeout; gloo then closes the connection.
        """
        if self.rank is None:
            return None
        size = int(receive(8, 0, _INITIAL, self.timeout).view(torch.int64))
        weights = pickle.loads(receive(size, 0, _INITIAL, self.timeout).numpy().data)
        if self.weights_buffer is None:
            return weights
        WeightStrategy().apply_weights(self.weights_buffer, weights)
        return self.weights_buffer

    @override
    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """The next weights; None when there are none within `timeout` seconds. send_ack() answers.

        Args:
            timeout: None is the transport's own.
            weights: a TensorDict or a dict to copy into; None: the constructor's weights_buffer.
            model: a module, TensorDict or dict to apply them to.
            strategy: how.

        Returns:
            (model_id, weights); the weights alone where one of the three keywords is given.

        Raises ManifestMismatch for weights that fit neither, which also raises in the sender; WriterDied when the
        sender is gone.
        """
        deadline = deadline_after(timeout, self.timeout)
        while (message := self._next_message(deadline)) is not None:
            target = self.weights_buffer if weights is None else weights
            try:
                received: Any = message.content
                if message.manifest is not None:
                    size = message.manifest.used_bytes
                    buffer = receive(size, message.source, message.tag, self.timeout, self._buffer)
                    self._buffer = buffer if self.uses_one_buffer else None
                    received = unpack(received, message.manifest, buffer)
                if message.call is not None:
                    function, *args = message.call
                    self.send_ack(content=function(received, *args))
                    continue
                for destination in (target, model):
                    if destination is not None:
                        (strategy or WeightStrategy()).apply_weights(destination, received)
            except Exception as error:
                self.send_failure(error)
                raise
            model_id, received = received.label.model_id, received if target is None else target
            return (model_id, received) if (weights, model, strategy) == (None, None, None) else received
        return None

    def _next_message(self, deadline: float) -> Message | None:
        if not self.connected:
            return None
        label, word = f"NODE_{self.rank}_in_label", f"NODE_{self.rank}_in"
        try:
            if not poll(lambda: self.store.check([label]), deadline):
                return None
            message: Message = pickle.loads(self.store.get(label))
            self.store.delete_key(label)
            # A loop of the user's own has deleted it already, perhaps. Other words are for that loop.
            if self.store.check([word]) and self.store.get(word) == UPDATE.encode():
                self.store.delete_key(word)
        except dist.DistError as error:
            raise WriterDied(f"{lost(error)}; no weights will come") from error
        self._taken = message
        return message

    @override
    def send_ack(self, message: str = "updated", content: Any = None) -> None:
        """Answer what receive_weights() returned last with this word; it may be answered once.

        Raises WriterDied when the store is gone, which mostly lives in the trainer.
        """
        taken, self._taken = self._taken, None
        if taken is None:
            return
        try:
            self.store.set(f"NODE_{self.rank}_out_version", pickle.dumps((taken.tag, content)))
            self.store.set(f"NODE_{self.rank}_out", message)
        except dist.DistError as error:
            raise WriterDied(f"{lost(error)}; nobody gets the answer") from error

    def send_failure(self, error: BaseException) -> None:
        """Answer what was received last with the exception that it raised here."""
        self.send_ack(FAILED, Failure.of(error))
