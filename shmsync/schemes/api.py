"""The weight-sync API: a scheme says how one model is synchronised, and makes its sender and its receivers.

One sender or receiver for each model, one transport for each worker. The shape is that of TorchRL's API. Here are the
three types that the schemes derive from.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ..engine.strategy import Form, WeightStrategy
from ..engine.timing import deadline_after
from ..errors import ProtocolError
from .errands import Calls, Errands
from .lookup import Arguments, chosen_workers, find_model, process_of, referenced_model, resolve_model
from .turns import Turns, turn


@runtime_checkable
class TransportBackend(Protocol):
    """How weights get to one worker.

    Optional: `send_weights_async`, `wait_ack`, `send_ack(message="updated")`, `check_ack(message="updated")`.
    """

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send, and wait until the worker has applied them."""

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        """In the worker: (model_id, weights), or None when nothing came within `timeout` seconds."""

    def check_connection(self) -> bool:
        """Can the other side still be reached?"""


class WeightSyncScheme(ABC):
    """How one model is synchronised between a sender and its workers.

    Args:
        strategy: the form in which weights are extracted, "state_dict" or "tensordict".

    A scheme is made once, and given to both sides: `init_on_sender` in the trainer, `init_on_worker` in each worker.
    Pickling keeps its configuration alone.
    """

    def __init__(self, strategy: Form = "state_dict") -> None:
        WeightStrategy(strategy)  # refuses another name now, not at the first send
        self.strategy = strategy
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
            **kwargs: the same names (`model`, `cached_weights`), instead of a context or beside it.

        Raises ValueError for missing or contradictory ones.
        """
        sender = self.create_sender()
        sender.set_context(context, model_id)
        sender.set_up(Arguments(model_id, context, kwargs))
        self._sender = sender
        self._initialized_on_sender = True

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Prepare to receive the model of this id.

        Args:
            context: over pipes it gives `.pipe` (the worker's end) and `.get_model(model_id)`. Held weakly.
            **kwargs: `pipe`, `model` instead, or beside it; for other schemes see their classes.

        Raises ValueError for missing ones.
        """
        receiver = self.create_receiver()
        receiver.set_context(context)
        receiver.set_up(Arguments(model_id, context, kwargs))
        self._receiver = receiver
        self._initialized_on_worker = True

    def get_sender(self) -> WeightSender:
        """The sender; RuntimeError before init_on_sender()."""
        if self._sender is None or not self._initialized_on_sender:
            raise RuntimeError(f"call init_on_sender() before get_sender() on this {type(self).__name__}")
        return self._sender

    def get_receiver(self) -> WeightReceiver:
        """The receiver; RuntimeError before init_on_worker()."""
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

        None: extracted from the context's model of this id, for "policy" else from its `_fallback_policy`; None when
        there is neither. A module: extracted. A string: a model id, resolved in the context. Anything else: as it is.

        Raises ValueError for a string without a context.
        """
        source = self.find_source(weights, model_id, context)
        return strategy.extract_weights(source) if isinstance(source, nn.Module) else source

    def find_source(self, weights: Any, model_id: str, context: Any = None) -> Any:
        """What prepare_weights() extracts from: a module, weights, or None."""
        if isinstance(weights, str):
            if context is None:
                raise ValueError(f"{weights!r} names a model of a context, and there is none; pass the model itself")
            return resolve_model(context, weights)
        if weights is not None or context is None:
            return weights
        model = find_model(context, model_id)
        fallback = getattr(context, "_fallback_policy", None) if model_id == "policy" else None
        return fallback if model is None else model

    def shutdown(self) -> None:  # noqa: B027  # most schemes hold nothing
        """Give back what the scheme holds. Idempotent; it also happens when the scheme is collected, and at exit."""

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_sender=None, _receiver=None, _initialized_on_sender=False, _initialized_on_worker=False)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class WeightSender:
    """Sends the weights of one model to its workers, over any transport. Made by a scheme.

    One send at a time: a call of another thread waits for its turn within its own deadline, and then raises WriterBusy.
    """

    sends = True  # False: its workers keep the weights they came with

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._strategy = WeightStrategy(scheme.strategy)
        self._model_id = "policy"
        self._model: Any = None
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

    def set_context(self, context: Any, model_id: str | None = None) -> None:
        """Look for the model here when send() gets none. Held weakly."""
        self._context_ref = None if context is None else weakref.ref(context)
        if model_id is not None:
            self._model_id = model_id

    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        """Reach this worker over this pipe from now on. It replaces an earlier worker of the same index.

        Args:
            process: the worker's Process, so that its death is seen at once; else it is known from its first answer,
                and before that only the end of its pipe tells.
        """
        self._transports[worker_idx] = self._scheme.create_transport(pipe_or_context)

    def set_up(self, arguments: Arguments) -> None:
        """Take in what init_on_sender() got. Called by the scheme."""
        self._model = arguments.get("model")
        pipes: Sequence[Any] | None = arguments.get("pipes")
        count = arguments.get("num_workers")
        if pipes is not None:
            if count is not None and count != len(pipes):
                raise ValueError(
                    f"num_workers is {count} but there are {len(pipes)} pipes; give one pipe for each worker"
                )
            for index, pipe in enumerate(pipes):
                self.register_worker(index, pipe, process_of(arguments, index))

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
        transports = {index: self._transports[index] for index in workers}
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
        found = self._scheme.find_source(weights, self._model_id, self._context)
        found = self._model if found is None else found
        if found is None:
            raise ValueError(
                f"there are no weights to send: pass them, or give init_on_sender() a context or a model= for "
                f"{self._model_id!r}"
            )
        return found

    def _prepared(self, weights: Any) -> Any:
        return self._scheme.prepare_weights(self._source(weights), self._model_id, self._strategy, self._context)

    @property
    def _context(self) -> Any:
        return None if self._context_ref is None else self._context_ref()

    def _refuse_pending(self, call: str) -> None:
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
        self._strategy = WeightStrategy(scheme.strategy)
        self._model_id = "policy"
        self._model_ref: Any = None
        self._context_ref: weakref.ref[Any] | None = None
        self._transport: Any = None
        self._version = 0

    @property
    def model_id(self) -> str:
        """Which model it receives."""
        return self._model_id

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

    def set_context(self, context: Any) -> None:
        """Look for the model here. Held weakly."""
        self._context_ref = None if context is None else weakref.ref(context)

    def register_model(self, model_ref: Any) -> None:
        """The model itself, or its id in the context."""
        self._model_ref = model_ref

    def register_worker_transport(self, pipe: Any) -> None:
        """Hear from the sender over this pipe."""
        self._transport = self._scheme.create_transport(pipe)

    def set_up(self, arguments: Arguments) -> None:
        """Take in what init_on_worker() got. Called by the scheme."""
        self._model_id = arguments.model_id
        model = arguments.model()
        self.register_worker_transport(arguments.needed("pipe"))
        self.register_model(arguments.model_id if model is None else model)

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
        if self._transport is None:
            return False
        received = self._transport.receive_weights(timeout=timeout)
        if received is None:
            return False
        self.apply_weights(received[1])
        return True

    def apply_weights(self, weights: Any) -> None:
        """Apply weights that the worker's own loop has read from the pipe, and say so to the sender."""
        self._strategy.apply_weights(self._resolve_model(), weights)
        if hasattr(self._transport, "send_ack"):
            self._transport.send_ack("updated")

    def close(self) -> None:
        """Give back what the receiver holds. Idempotent; it also happens when the process ends."""

    def _resolve_model(self) -> Any:
        return referenced_model(self._model_ref, self._context_ref)

    def __getstate__(self) -> dict[str, Any]:
        model_ref = self._model_ref if isinstance(self._model_ref, str) else None
        return {**self.__dict__, "_context_ref": None, "_model_ref": model_ref, "_transport": None}
