"""The weight-sync API: a scheme says how one model is synchronised, and makes its sender and its receivers.

One sender or receiver for each model, one transport for each worker. The shape is that of TorchRL's API. Here are the
three types that the schemes derive from.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from torch import nn

from ..engine.dtypes import Dtypes
from ..engine.strategy import Form, WeightStrategy
from ..engine.timing import check_worker, deadline_after
from ..errors import ClosedError, ProtocolError
from .errands import Calls, Errands
from .lookup import (
    Arguments,
    check_names,
    chosen_workers,
    find_model,
    model_at,
    model_in,
    named_content,
    process_of,
    referenced_model,
)
from .turns import Turns, turn

S = TypeVar("S", bound="WeightSyncScheme")


@runtime_checkable
class TransportBackend(Protocol):
    """How weights get to one worker.

    These two methods make one. Optional: `send_weights_async`, `wait_ack`, `send_ack(message="updated")`,
    `check_ack(message="updated")`, `check_connection()`.
    """

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send, and wait until the worker has applied them."""

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        """In the worker: (model_id, weights), or None when nothing came within `timeout` seconds."""


class WeightSyncScheme(ABC):
    """How one model is synchronised between a sender and its workers.

    Args:
        strategy: the form in which weights are extracted, "state_dict" or "tensordict".
        partial: weights may lack leaves; only those that are given change. Others are refused by name.
        dtype: floating leaves are cast to it before they travel; a mapping of glob patterns on dotted keys to dtypes
            casts those that match. As in Publisher.

    A scheme is made once, and given to both sides: `init_on_sender` in the trainer, `init_on_worker` in each worker.
    Pickling keeps its configuration alone. `with scheme:` ends with shutdown(), and so the scheme's use.

    `sender_takes` and `worker_takes` are the keyword arguments of init_on_sender() and init_on_worker(). A subclass
    that reads more of them extends these sets, or else what it has not read is refused afterwards.
    """

    sender_takes: ClassVar[frozenset[str]] = frozenset({"pipes", "num_workers", "model"})
    worker_takes: ClassVar[frozenset[str]] = frozenset({"pipe", "model", "worker_idx"})

    _depth = 0  # of `with` blocks
    _over = False

    def __init__(self, strategy: Form = "state_dict", *, partial: bool = False, dtype: Dtypes = None) -> None:
        self.strategy = strategy
        self.partial = partial
        self.dtype = dtype
        self.make_strategy()  # refuses wrong arguments now, not at the first send
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._initialized_on_sender = False
        self._initialized_on_worker = False

    def init_on_sender(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Prepare to send the model of this id.

        Args:
            model_id: a path such as "policy", "env.value_net", "env.transform[0]".
            context: over pipes it gives `.pipes` (one end of a Pipe for each worker), `.num_workers`,
                `.get_model(model_id)`, `.get_cached_weights(model_id)` and `.procs` (the workers' processes, perhaps
                filled later). Held weakly. For what other schemes take and raise see their classes.
            **kwargs: the same names, instead of a context or beside it, and `model`, which wins over what the context
                has under the id.

        Raises ValueError for missing or contradictory ones, TypeError for unknown ones, ClosedError after shutdown().
        """
        self.check_open("init_on_sender")
        arguments = Arguments(model_id, context, kwargs)
        late = check_names(self, "sender_takes", arguments)
        sender = self.create_sender()
        sender._set_context(context, model_id)
        sender.set_up(arguments)
        late()
        self._sender = sender
        self._initialized_on_sender = True

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Prepare to receive the model of this id.

        Args:
            context: over pipes it gives `.pipe` (the worker's end) and `.get_model(model_id)`. Held weakly.
            **kwargs: `pipe`, `model` instead, or beside it; for other schemes see their classes. `worker_idx`: the
                index by which errors name this worker where its sender has given it none.

        Raises ValueError for missing ones, TypeError for unknown ones, ClosedError after shutdown().
        """
        self.check_open("init_on_worker")
        arguments = Arguments(model_id, context, kwargs)
        late = check_names(self, "worker_takes", arguments)
        receiver = self.create_receiver()
        receiver._set_context(context)
        receiver.set_up(arguments)
        late()
        self._receiver = receiver
        self._initialized_on_worker = True

    def get_sender(self) -> WeightSender:
        """The sender; RuntimeError before init_on_sender(), ClosedError after shutdown()."""
        self.check_open("get_sender")
        if self._sender is None or not self._initialized_on_sender:
            raise RuntimeError(f"call init_on_sender() before get_sender() on this {type(self).__name__}")
        return self._sender

    def get_receiver(self) -> WeightReceiver:
        """The receiver; RuntimeError before init_on_worker(), ClosedError after shutdown()."""
        self.check_open("get_receiver")
        if self._receiver is None or not self._initialized_on_worker:
            raise RuntimeError(f"call init_on_worker() before get_receiver() on this {type(self).__name__}")
        return self._receiver

    @abstractmethod
    def create_transport(self, pipe_or_context: Any) -> TransportBackend:
        """The transport to one worker."""

    def create_sender(self) -> WeightSender:
        """A sender that knows no worker yet."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """A receiver that has no model yet."""
        return WeightReceiver(self)

    def prepare_weights(self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None) -> Any:
        """What a send of `weights` transports.

        None: extracted from the model that init_on_sender(model=) got, else from the context's model of this id, for
        "policy" else from its `_fallback_policy`; None when there is none of these. A module: extracted. A string: a
        model id, resolved in the context. Anything else: as it is.

        A subclass may supply the weights itself: it gets what was passed to send(), None and strings too, and what it
        returns is what travels, in every scheme.

        Raises ValueError for a string without a context, and for one under which the context has no model.
        """
        source = self.find_source(weights, model_id, context)
        return strategy.extract_weights(source) if isinstance(source, nn.Module) else source

    def find_source(self, weights: Any, model_id: str, context: Any = None) -> Any:
        """What prepare_weights() extracts from: a module, weights, or None."""
        sender = self._sender if self._sender is not None and self._sender.model_id == model_id else None
        if sender is not None and sender._model is not None and (weights is None or _is_name(weights, model_id)):
            return sender._model
        if isinstance(weights, str):
            if context is None:
                raise ValueError(f"{weights!r} names a model of a context, and there is none; pass the model itself")
            return model_in(context, weights)
        if weights is not None:
            return weights
        found = None if context is None else find_model(context, model_id)
        if found is None and model_id == "policy":
            found = model_at(context, "_fallback_policy")
        return sender._context_model if found is None and sender is not None else found

    def make_strategy(self) -> WeightStrategy:
        """A strategy with this scheme's options, for either side."""
        return WeightStrategy(self.strategy, partial=self.partial, dtype=self.dtype)

    def check_open(self, call: str) -> None:
        """Raise ClosedError after shutdown()."""
        if self._over:
            kind = type(self).__name__
            raise ClosedError(f"{call}: this {kind} was shut down, and what it held is gone; make a new one")

    def shutdown(self) -> None:
        """Give back what the scheme holds. Idempotent; it also happens when the scheme is collected, and at exit.

        Every later use of the scheme is a ClosedError.
        """
        self._over = True

    def __enter__(self: S) -> S:
        self.check_open("with")
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            self.shutdown()
        except Exception:
            if error is None:
                raise
            # The caller's own error tells more.
        finally:
            self._over = True  # a subclass may have a shutdown() of its own

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_sender=None, _receiver=None, _initialized_on_sender=False, _initialized_on_worker=False)
        state.update(_depth=0, _over=False)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _is_name(weights: Any, model_id: str) -> bool:
    return isinstance(weights, str) and weights == model_id


class WeightSender:
    """Sends the weights of one model to its workers, over any transport. Made by a scheme.

    One send at a time: a call of another thread waits for its turn within its own deadline, and then raises WriterBusy.
    """

    sends = True  # False: its workers keep the weights they came with
    takes_process = False  # can it see the death of a worker's process?

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._strategy = scheme.make_strategy()
        self._model_id = "policy"
        self._model: Any = None  # that init_on_sender() was given
        self._model_names: tuple[str, ...] = ()  # under which the context may have it, if not under the id
        self._processes: dict[int, Any] = {}  # of workers that are being registered
        self._context_ref: weakref.ref[Any] | None = None
        self._transports: dict[int, Any] = {}
        self._version = 0
        self._pending: tuple[list[int], Any] | None = None  # of a send_async(): workers, and what _post() gave
        self._turns = Turns()
        self._errands = Errands()
        self._copied = False  # it came out of a pickle, without the workers of the original

    @property
    def model_id(self) -> str:
        """Which model it sends."""
        return self._model_id

    @property
    def version(self) -> int:
        """Of the newest weights that were sent; 0: none yet."""
        return self._version

    @property
    def worker_ids(self) -> list[int]:
        """The registered workers."""
        return sorted(self._transports)

    def is_dead(self, worker_idx: int) -> bool:
        """Has a WorkerDied named this worker, so that sends leave it out?"""
        return False

    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        """Reach this worker over this pipe from now on. It replaces an earlier worker of the same index.

        Args:
            worker_idx: 0 or more.
            process: over pipes the worker's Process, so that its death is seen at once; else it is known from its first
                answer, and before that only the end of its pipe tells. Other schemes notice deaths by themselves.

        Raises ValueError for another index, TypeError for a process that nobody would look at.
        """
        worker_idx = check_worker(worker_idx)
        if process is not None:
            if not self.takes_process:
                raise TypeError(
                    f"a {type(self).__name__} cannot watch process={process!r}; leave it out for worker {worker_idx}"
                )
            self._processes[worker_idx] = process
        try:
            self._register_worker(worker_idx, pipe_or_context)
        finally:
            self._processes.pop(worker_idx, None)

    # Hooks: a subclass may override these, in every scheme.

    def _set_context(self, context: Any, model_id: str | None = None) -> None:
        """Look for the model here when send() gets none. Held weakly."""
        self._context_ref = None if context is None else weakref.ref(context)
        if model_id is not None:
            self._model_id = model_id

    def _register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Reach this worker from now on."""
        self._transports[worker_idx] = self._scheme.create_transport(pipe_or_context)

    def _iterate_transports(self, worker_ids: int | Sequence[int] | None = None) -> Iterator[Any]:
        """The transports of these workers. A send goes to the workers whose transports this yields."""
        for index in chosen_workers(worker_ids, self.worker_ids):
            yield self._transport_of(index)

    def _transport_of(self, index: int) -> Any:
        return self._transports[index]

    def _reached(self, workers: list[int]) -> list[int]:
        """Those of these workers whose transports _iterate_transports() yields."""
        if not self._picks:
            return workers
        own = {id(self._transport_of(index)): index for index in workers}
        reached = []
        for transport in self._iterate_transports(workers):
            if id(transport) not in own:
                raise ValueError(
                    f"_iterate_transports() yields {transport!r}, which is the transport of none of the workers "
                    f"{workers}; yield what super()._iterate_transports() gives"
                )
            reached.append(own[id(transport)])
        return sorted(reached)

    @property
    def _picks(self) -> bool:
        """Does a subclass choose who is sent to?"""
        return type(self)._iterate_transports is not WeightSender._iterate_transports

    def set_up(self, arguments: Arguments) -> None:
        """Take in what init_on_sender() got. Called by the scheme."""
        self._take_model(arguments, "model")
        pipes: Sequence[Any] | None = arguments.get("pipes")
        count = arguments.get("num_workers")
        if pipes is not None:
            if count is not None and count != len(pipes):
                raise ValueError(
                    f"num_workers is {count} but there are {len(pipes)} pipes; give one pipe for each worker"
                )
            for index, pipe in enumerate(pipes):
                self.register_worker(index, pipe, process_of(arguments, index) if self.takes_process else None)

    def _take_model(self, arguments: Arguments, *names: str) -> None:
        """The model that was given under the first of these names; else what the context has there."""
        self._model = next((m for name in names if (m := arguments.given(name)) is not None), None)
        self._model_names = names

    @property
    def _context_model(self) -> Any:
        context = self._context
        return next((m for name in self._model_names if (m := model_at(context, name)) is not None), None)

    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> int:
        """Send weights, and wait until every worker has applied them.

        Args:
            weights: a module, a TensorDict, a dict, a model id, or None for the context's model.
            worker_ids: None sends to all workers, an int to one, a list to several.
            timeout: seconds for the whole call; None is the scheme's default.

        Returns:
            The version that the weights have now: it grows with every send.

        Raises:
            WriterBusy: another thread was sending all that time, or this one is inside a send; nothing was sent.
            RuntimeError: a send_async() is pending. ValueError: a worker that is not registered, or no weights.
            ProtocolError: this sender was unpickled and has no workers.
            ManifestMismatch: the weights do not fit; nobody was changed.
            WorkerDied, AckTimeout: sent, but these workers have not applied it; the others have. The sender stays
            usable, and the dead are left out from now on. An exception of a worker raises here, with its traceback
            as the cause.
        """
        deadline = self._deadline(timeout)
        with turn(self.turns(), deadline, "send"):
            self.check_ready("send")
            workers = self._chosen(worker_ids)
            posted = self._post(weights, workers, deadline)
            self._collect(workers, posted, deadline)
            return self.version

    def send_async(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> int:
        """Send weights and return at once; wait_async() waits. Raises as send() does, but for what workers do."""
        deadline = self._deadline(timeout)
        with turn(self.turns(), deadline, "send_async"):
            self.check_ready("send_async")
            workers = self._chosen(worker_ids)
            self._pending = workers, self._post(weights, workers, deadline)
            return self.version

    def wait_async(self, *, timeout: float | None = None) -> int:
        """Wait for the pending send_async(), and return its version.

        Raises RuntimeError when none is pending, and what send() raises; then nothing is pending any more.
        """
        deadline = self._deadline(timeout)
        with turn(self.turns(), deadline, "wait_async"):
            if self._pending is None:
                raise RuntimeError("no send is pending; call send_async() first")
            (workers, posted), self._pending = self._pending, None
            self._collect(workers, posted, deadline)
            return self.version

    def update_weights(self, weights: Any) -> int:
        """Call send(weights)."""
        return self.send(weights)

    # What the kinds of senders do differently.

    def _post(self, weights: Any, workers: list[int], deadline: float) -> Any:
        """Start sending; what _collect() needs."""
        prepared = self._prepared(weights)
        self._version += 1
        names = {id(transport): index for index, transport in self._transports.items()}
        transports = {
            names.get(id(transport), position): transport
            for position, transport in enumerate(self._iterate_transports(workers))
        }
        calls = Calls(self._errands, transports, f"version {self._version} of {self._model_id!r}", self._version)
        calls.send(self._model_id, prepared, deadline)
        return calls

    def _collect(self, workers: list[int], posted: Any, deadline: float) -> None:
        """Wait for every answer."""
        if posted:  # of a sender that sends nothing it is empty
            posted.finish(deadline)

    def _deadline(self, timeout: float | None) -> float:
        return deadline_after(timeout, math.inf)  # without a deadline the transports' own time-outs count

    def turns(self) -> list[Turns]:
        """What a send has to itself while it lasts."""
        return [self._turns]

    def check_ready(self, call: str) -> None:
        """Raise RuntimeError if a send_async() is pending, ProtocolError if this is a copy that reaches nobody."""
        self._refuse_pending(call)
        if self._copied and self.sends and not self.worker_ids:
            raise ProtocolError(
                f"{call}() of a sender that was copied or unpickled: pipes and workers stayed with the original, so it "
                "has no workers; call register_worker() for each first"
            )

    def _source(self, weights: Any) -> Any:
        """What the user means: a module or weights."""
        if weights is None and self._model is not None:
            return self._model
        found = self._scheme.find_source(weights, self._model_id, self._context)
        found = self._context_model if found is None else found
        return self._needed_source(found)

    def _needed_source(self, found: Any) -> Any:
        if found is None:
            raise ValueError(
                f"there are no weights to send: pass them, or give init_on_sender() a context or a model= for "
                f"{self._model_id!r}"
            )
        return found

    @property
    def _prepares(self) -> bool:
        """Does the user's scheme prepare weights in its own way?"""
        return getattr(self._scheme.prepare_weights, "__func__", None) is not WeightSyncScheme.prepare_weights

    def _prepared(self, weights: Any) -> Any:
        """The weights that travel."""
        if self._prepares:
            found = self._scheme.prepare_weights(weights, self._model_id, self._strategy, self._context)
        else:
            found = self._source(weights)
        found = self._needed_source(found)
        if isinstance(found, nn.Module):
            return self._strategy.extract_weights(found)
        return self._strategy.cast(found)

    @property
    def _context(self) -> Any:
        return None if self._context_ref is None else self._context_ref()

    def _refuse_pending(self, call: str) -> None:
        self._scheme.check_open(call)
        if self._pending is not None:
            raise RuntimeError(f"{call}() while a send_async() is pending; call wait_async() first")

    def _chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        return chosen_workers(worker_ids, self.worker_ids)

    def __getstate__(self) -> dict[str, Any]:
        # Pipes and contexts belong to this process: a copy has to register its own workers.
        return {
            **self.__dict__,
            "_context_ref": None,
            "_model": None,
            "_pending": None,
            "_transports": {},
            "_copied": True,
        }


class WeightReceiver:
    """Receives the weights of one model, over any transport. Made by a scheme."""

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._strategy = scheme.make_strategy()
        self._model_id = "policy"
        self._worker_idx: int | None = None
        self._model_ref: Any = None
        self._context_ref: weakref.ref[Any] | None = None
        self._transport: Any = None
        self._version = 0

    @property
    def model_id(self) -> str:
        """Which model it receives."""
        return self._model_id

    @property
    def worker_idx(self) -> int | None:
        """The index that init_on_worker() was given for this worker."""
        return self._worker_idx

    @property
    def transport(self) -> Any:
        """How the weights come; None before init_on_worker()."""
        return self._transport

    def pending(self) -> list[Any]:
        """Messages that came over the pipe and are not about weights, oldest first; each is given once."""
        return list(self._transport.pending()) if hasattr(self._transport, "pending") else []

    @property
    def version(self) -> int:
        """The version of the weights that the model uses now; 0: those it came with.

        To wait for a version, loop until receive() is True: with shared memory the model may use it before that.
        """
        return self._version

    # Hooks: a subclass may override these, in every scheme.

    def _set_context(self, context: Any) -> None:
        """Look for the model here. Held weakly."""
        self._context_ref = None if context is None else weakref.ref(context)

    def _register_model(self, model_ref: Any) -> None:
        """The model itself, or its id in the context."""
        self._model_ref = model_ref

    def _register_worker_transport(self, pipe: Any) -> None:
        """Hear from the sender over this pipe."""
        self._transport = self._scheme.create_transport(pipe)

    def _resolve_model_ref(self) -> Any:
        """The model that weights are applied to. Raises ValueError when there is none."""
        return referenced_model(self._model_ref, self._context_ref)

    def set_up(self, arguments: Arguments) -> None:
        """Take in what init_on_worker() got. Called by the scheme."""
        self._take_worker(arguments)
        model = arguments.model()
        self._register_worker_transport(arguments.needed("pipe"))
        self._register_model(arguments.model_id if model is None else model)

    def _take_worker(self, arguments: Arguments) -> None:
        """Which model it is, and which worker."""
        self._model_id = arguments.model_id
        worker = arguments.get("worker_idx")
        self._worker_idx = None if worker is None else check_worker(worker)

    def receive(self, timeout: float = 0.001) -> bool:
        """Apply what has arrived, and say so to the sender.

        Args:
            timeout: seconds to wait for the first message; 0 only looks.

        Returns:
            Were there new weights?

        Raises:
            ValueError: no model is registered, or the context that had it is gone. WriterDied: the sender is gone.
            An exception while applying is raised here and, with its traceback, in the sender.
        """
        self._scheme.check_open("receive")
        if self._transport is None:
            return False
        received = self._transport.receive_weights(timeout=timeout)
        if received is None:
            return False
        named_content(received, self._model_id)  # or raise
        self.apply_weights(received[1])
        return True

    def apply_weights(self, weights: Any) -> None:
        """Apply weights that the worker's own loop has read, alone or as (model_id, weights), and tell the sender.

        Raises ValueError for weights of another model, and what applying raises.
        """
        weights = named_content(weights, self._model_id)
        self._strategy.apply_weights(self._resolve_model_ref(), weights)
        if hasattr(self._transport, "send_ack"):
            self._transport.send_ack("updated")

    def close(self) -> None:
        """Give back what the receiver holds. Idempotent; it also happens when the process ends."""

    def __getstate__(self) -> dict[str, Any]:
        model_ref = self._model_ref if isinstance(self._model_ref, str) else None
        return {**self.__dict__, "_context_ref": None, "_model_ref": model_ref, "_transport": None}
