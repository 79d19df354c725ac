"""The receiver: what applies the weights of one model in a worker. Schemes derive theirs from it."""

from __future__ import annotations

from typing import Any

from ..engine.deadlines import check_worker, timeout_or_none
from .context_args import Arguments, model_in, named_content
from .scheme_end import SchemeEnd


class WeightReceiver(SchemeEnd):
    """Receives the weights of one model, over any transport. Made by a scheme.

    Args:
        scheme: the WeightSyncScheme that makes it.
    """

    def __init__(self, scheme: Any) -> None:
        super().__init__(scheme)
        self._worker_idx: int | None = None
        self._model_ref: Any = None
        self._transport: Any = None
        self._version = 0

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

    # Hooks: a subclass may override these and _set_context(), in every scheme.

    def _register_model(self, model_ref: Any) -> None:
        """The model itself, or its id in the context."""
        self._model_ref = model_ref

    def _register_worker_transport(self, pipe: Any) -> None:
        """Receive from the sender over this pipe."""
        self._transport = self._scheme.create_transport(pipe)

    def _resolve_model_ref(self) -> Any:
        """The model that weights are applied to. Raises ValueError when there is none."""
        reference = self._model_ref
        if reference is not None and not isinstance(reference, str):
            return reference
        if reference is None or self._context_ref is None:
            which = "" if reference is None else f" for {reference!r}"
            raise ValueError(f"no model is registered{which}; give init_on_worker() model= or a context that has it")
        if (context := self._living_context) is None:
            raise ValueError(f"the context that had {reference!r} is gone; keep it as long as its receiver")
        return model_in(context, reference)

    def begin(self, arguments: Arguments) -> None:
        """Take in the arguments that init_on_worker() got. Called by the scheme."""
        self._set_context(arguments.context)
        self.set_up(arguments)

    def set_up(self, arguments: Arguments) -> None:
        """Take in the model, and the way to the sender, from these arguments."""
        self._take_worker(arguments)
        model = arguments.model()
        self._register_worker_transport(arguments.needed("pipe"))
        self._register_model(arguments.model_id if model is None else model)

    def _take_worker(self, arguments: Arguments) -> None:
        """Which model it is, and which worker."""
        self._model_id = arguments.model_id
        worker = arguments.get("worker_idx")
        self._worker_idx = None if worker is None else check_worker(worker)

    def receive(self, timeout: float | None = 0.001) -> bool:
        """Apply what has arrived, and say so to the sender.

        Args:
            timeout: seconds to wait for the first message; 0 only looks, None is the scheme's or the transport's own.

        Returns:
            Were there new weights? None ever come to a receiver that was copied or unpickled, which has no way to its
            sender.

        Raises:
            ValueError: no model is registered, or the context that had it is gone.
            WriterDied: the sender is gone.
            Exception: that of applying them, here and, with its traceback, in the sender.
        """
        timeout = timeout_or_none(timeout)
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
        return {**super().__getstate__(), "_model_ref": model_ref, "_transport": None}
