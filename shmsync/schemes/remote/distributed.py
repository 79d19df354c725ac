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
import math
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
from ...errors import ProtocolError, WriterDied
from ..context import Arguments
from ..receiver import WeightReceiver
from ..strategy import WeightStrategy
from .base import Dead, Failed, Label, News, PackedWeights, RemoteReceiver, RemoteScheme, RemoteTransport, unpack
from .nodes import NodeFanOut

_log = logging.getLogger("shmsync")

UPDATE, UPDATED, FAILED = "update_weights", "updated", "failed"
_FASTEST, _SLOWEST = 0.0002, 0.005  # seconds between two looks into a store
_FIRST_PROBE = 0.05  # seconds
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
    which is held weakly. Both raise ProtocolError without a process group when one is needed.
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
        store, rank = (None, None) if pipe_or_context is None else pipe_or_context
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
                need_group("ranks= or num_workers=")
                ranks = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        store = store_of(arguments)
        return [(store, rank) for rank in ranks]


def store_of(arguments: Arguments) -> Any:
    """The store for a model: each model but "policy" has its own keys."""
    store = arguments.get("store")
    if store is None:
        need_group("store=")
        store = dist.PrefixStore("shmsync", dist.distributed_c10d._get_default_store())
    return store if arguments.model_id == "policy" else dist.PrefixStore(arguments.model_id, store)


def need_group(instead: str = "") -> None:
    """Raise ProtocolError when there is no process group. `instead`: what would do as well."""
    if not dist.is_initialized():
        raise ProtocolError(
            "there is no process group; call torch.distributed.init_process_group() first"
            + (f", or give {instead}" if instead else ": it moves the bytes of the weights. Nothing was sent")
        )


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
    size: int  # bytes that come by isend()
    content: Label | News | None  # a Label says what these bytes are
    call: tuple[Any, ...] | None  # (function, arguments): answer what it returns; None: apply the content


class RankRequest:
    """A message to a rank, as a future of its answer. `expected`: the word that means that all went well."""

    expected = UPDATED

    def __init__(self, store: Any, rank: int, content: Any, call: tuple[Any, ...] | None = None) -> None:
        tag, packed = next(_tags), content if isinstance(content, PackedWeights) else None
        self._store, self._key = store, (rank, tag)
        self._out = f"NODE_{rank}_out"
        self._answer: tuple[str, Any] | None = None
        self._dead = ""
        self._began = self._probed = time.monotonic()
        if packed is not None:
            need_group()
            _kept[self._key] = isend(packed.buffer, rank, tag), packed  # nobody else gets the buffer meanwhile
        else:
            probe(rank)
        source, size = dist.get_rank() if dist.is_initialized() else 0, 0 if packed is None else packed.buffer.nbytes
        message = Message(tag, source, size, content if packed is None else packed.label, call)
        try:
            store.set(f"NODE_{rank}_in_label", pickle.dumps(message))
            store.set(f"NODE_{rank}_in", UPDATE)
        except dist.DistError as error:
            raise Dead(lost(error)) from error

    def done(self) -> bool:
        """Take the answer, if it is there. If not, now and then find out whether the rank is dead."""
        now = time.monotonic()
        try:
            probes = now - self._probed >= max(_FIRST_PROBE, self._probed - self._began)
            if not self._dead and not self._is_answered() and probes:
                self._probed = now
                try:
                    probe(self._key[0])
                except Dead as dead:
                    if not self._is_answered():  # it may have answered, and then died
                        self._dead = str(dead)
        except dist.DistError as error:
            self._dead = lost(error)
        return self._answer is not None or bool(self._dead)

    def _is_answered(self) -> bool:
        if self._answer is None and self._store.check([self._out]):
            word, beside = self._store.get(self._out).decode(), f"{self._out}_version"
            tag, content = None, None
            if self._store.check([beside]):  # a loop of the user's own may set the word alone
                tag, content = pickle.loads(self._store.get(beside))
                self._store.delete_key(beside)
            self._store.delete_key(self._out)
            if tag in (None, self._key[1]):
                self._answer = word, content
        return self._answer is not None

    def result(self) -> Any:
        """The answer, once it is done. Raises Dead, Failed."""
        _kept.pop(self._key, None)
        if self._answer is None:
            raise Dead(self._dead)
        word, content = self._answer
        if word == FAILED and isinstance(content, Failure):
            raise Failed(content)
        if word != self.expected:
            raise Failed(f"it answered {word!r} instead of {self.expected!r}")
        _kept.pop((self._key[0], _INITIAL), None)  # a rank takes them before it takes messages
        return content


def isend(tensor: torch.Tensor, rank: int, tag: int) -> Any:
    """Begin to send; the work. Raises Dead when the rank's connection is closed."""
    try:
        return dist.isend(tensor, rank, tag=tag)
    except RuntimeError as error:
        raise Dead(f"gloo: {' '.join(str(error).split())[:200]}") from error


def probe(rank: int) -> None:
    """Send nothing, under a tag that nobody receives. Raises Dead when the rank is dead."""
    if dist.is_initialized():
        isend(torch.empty(0), rank, next(_tags))


def lost(error: Exception) -> str:
    """How a store that cannot be reached reads in an error."""
    return f"the store cannot be reached: {str(error)[:200]}"


# ---- the worker's side


def receive(size: int, source: int, tag: int, timeout: float, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """So many bytes of this tag. Raises WriterDied when the sender is gone, or does not send them in time."""
    if buffer is None or buffer.nbytes != size:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        need_group()
        try:
            work: Any = dist.irecv(buffer, source, tag=tag)
            work.wait(timedelta(days=365) if timeout == math.inf else timedelta(seconds=timeout))
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
        super()._connect(arguments)
        rank = arguments.get("rank")
        if rank is None:
            need_group("rank=")
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
    def start(self, content: Any) -> RankRequest:
        return RankRequest(self.store, self.rank, content)  # type: ignore[arg-type]

    def call(self, function: Callable[..., Any], content: Any = None, *args: Any) -> RankRequest:
        """Let the rank's receive() call function(content, *args), and answer what that returns."""
        return RankRequest(self.store, self.rank, content, (function, *args))  # type: ignore[arg-type]

    @staticmethod
    @override
    def wait(requests: Sequence[Any], seconds: float) -> None:
        poll(lambda: all(request.done() for request in requests), time.monotonic() + seconds)

    @override
    def check_ack(self, message: str = "updated") -> None:
        """Wait for the answer to the last send_weights_async(), which should be `message`; RuntimeError for another."""
        if isinstance(self.request, RankRequest):
            self.request.expected = message
        self.wait_ack()

    def send_initial_weights(self, weights: Any) -> None:
        """Send weights without the store, to a worker that calls receive_initial_weights(). Does not wait for it.

        Their bytes are kept until the rank has answered a message. Raises ProtocolError without a process group,
        RuntimeError when the rank is dead.
        """
        if self.rank is None:
            return
        need_group()
        packed = self._packer.pack(weights, "policy", 0)
        whole = pickle.dumps((packed.label, packed.buffer.numpy()), protocol=5)
        parts = [torch.tensor([len(whole)], device="cpu"), torch.frombuffer(bytearray(whole), dtype=torch.uint8)]
        try:
            works = [isend(part, self.rank, _INITIAL) for part in parts]
        except Dead as dead:
            raise RuntimeError(f"rank {self.rank} is dead: {dead}") from dead
        _kept.setdefault((self.rank, _INITIAL), []).append((works, parts))

    def receive_initial_weights(self) -> Any:
        """What rank 0 sends with send_initial_weights(); None without a rank. Does not use the store.

        Raises WriterDied when they do not come within the transport's timeout; gloo then closes the connection.
        """
        if self.rank is None:
            return None
        size = int(receive(8, 0, _INITIAL, self.timeout).view(torch.int64))
        weights = unpack(*pickle.loads(receive(size, 0, _INITIAL, self.timeout).numpy().data))
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
                received = self._content_of(message)
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

    def _content_of(self, message: Message) -> Any:
        if not isinstance(message.content, Label):
            return message.content
        buffer = receive(message.size, message.source, message.tag, self.timeout, self._buffer)
        self._buffer = buffer if self.uses_one_buffer else None
        return unpack(message.content, buffer)

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
