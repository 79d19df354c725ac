"""The weight-sync API: a scheme says how one model is synchronised, and makes its sender and its receivers.

One sender or receiver for each model, one transport for each worker. The shape is that of TorchRL's API.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ..engine.strategy import Form, WeightStrategy
from .lookup import Arguments, resolve_model
from .receiver import WeightReceiver
from .sender import WeightSender


@runtime_checkable
class TransportBackend(Protocol):
    """How weights get to one worker. These may be missing: `send_weights_async`, `wait_ack`, `send_ack(message=
    "updated")`, `check_ack(message="updated")`."""

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
            context: gives `.pipes` (one end of a Pipe for each worker), `.num_workers`, `.get_model(model_id)`,
                `.get_cached_weights(model_id)` and `.procs` (the workers' processes, perhaps filled later). Held
                weakly. What it lacks is not used.
            **kwargs: `pipes`, `num_workers`, `model`, `cached_weights`, `procs` instead of a context, or beside it.

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
            context: gives `.pipe` (the worker's end) and `.get_model(model_id)`. Held weakly.
            **kwargs: `pipe`, `model` instead, or beside it. Others are for other schemes.

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
        """The same before anything is extracted: a module, weights, or None."""
        if isinstance(weights, str):
            if context is None:
                raise ValueError(f"{weights!r} names a model of a context, and there is none; pass the model itself")
            return resolve_model(context, weights)
        if weights is not None or context is None:
            return weights
        try:
            model = resolve_model(context, model_id)
        except (AttributeError, KeyError, IndexError):
            model = None
        if model is None and model_id == "policy":
            model = getattr(context, "_fallback_policy", None)
        return model

    def shutdown(self) -> None:  # noqa: B027  # most schemes hold nothing
        """Give back what the scheme holds. Idempotent; it also happens when the scheme is collected, and at exit."""

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_sender=None, _receiver=None, _initialized_on_sender=False, _initialized_on_worker=False)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
