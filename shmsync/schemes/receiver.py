"""The receiver of one model, in one worker."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..engine.strategy import WeightStrategy
from .lookup import resolve_model

if TYPE_CHECKING:
    from .base import WeightSyncScheme
    from .lookup import Arguments


class WeightReceiver:
    """Receives the weights of one model. Made by a scheme. This one hears from any transport."""

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
        """Of the weights that the model uses now; 0: those it came with. To wait for a version, loop until receive()
        is True: with shared memory the model may use a version that receive() has not answered for."""
        return self._version

    def set_context(self, context: Any) -> None:
        """Where to look for the model. Held weakly."""
        self._context_ref = None if context is None else weakref.ref(context)

    def register_model(self, model_ref: Any) -> None:
        """The model itself, or its id in the context."""
        self._model_ref = model_ref

    def register_worker_transport(self, pipe: Any) -> None:
        """Hear from the sender over this pipe."""
        self._transport = self._scheme.create_transport(pipe)

    def set_up(self, arguments: Arguments) -> None:
        """What init_on_worker() got. For the scheme."""
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
        reference = self._model_ref
        if reference is None:
            raise ValueError("no model is registered; give init_on_worker() model= or a context that has it")
        if not isinstance(reference, str):
            return reference
        if self._context_ref is None:
            raise ValueError(
                f"no model is registered for {reference!r}; give init_on_worker() model= or a context that has it"
            )
        context = self._context_ref()
        if context is None:
            raise ValueError(f"the context that had {reference!r} is gone; keep it as long as its receiver")
        return resolve_model(context, reference)

    def __getstate__(self) -> dict[str, Any]:
        model_ref = self._model_ref if isinstance(self._model_ref, str) else None
        return {**self.__dict__, "_context_ref": None, "_model_ref": model_ref, "_transport": None}
