"""The sender of one model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..engine.strategy import WeightStrategy

if TYPE_CHECKING:
    from .base import WeightSyncScheme
    from .lookup import Arguments


class WeightSender:
    """Sends the weights of one model to its workers. Made by a scheme.

    This one speaks to any transport, one worker after the other; the senders of pipe schemes speak to all at once.
    """

    _sends = True  # False: its workers keep the weights they came with

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._strategy = WeightStrategy(scheme.strategy)
        self._model_id = "policy"
        self._model: Any = None
        self._context_ref: weakref.ref[Any] | None = None
        self._transports: dict[int, Any] = {}
        self._transport: Any = None  # the one for all workers, where there is only one
        self._version = 0
        self._pending: tuple[list[int], Any] | None = None  # of a send_async(): workers, and what _post() gave

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
        """Where to look for the model when send() gets none. Held weakly."""
        self._context_ref = None if context is None else weakref.ref(context)
        if model_id is not None:
            self._model_id = model_id

    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        """Reach this worker over this pipe from now on, also instead of an earlier one.

        Args:
            process: the worker's Process, so that its death is seen at once; else it is known from its first answer,
                and before that only the end of its pipe tells.
        """
        self._transports[worker_idx] = self._scheme.create_transport(pipe_or_context)

    def set_up(self, arguments: Arguments) -> None:
        """What init_on_sender() got. For the scheme."""
        self._model = arguments.get("model")
        pipes: Sequence[Any] | None = arguments.get("pipes")
        count = arguments.get("num_workers")
        if pipes is not None:
            if count is not None and count != len(pipes):
                raise ValueError(
                    f"num_workers is {count} but there are {len(pipes)} pipes; give one pipe for each worker"
                )
            for index, pipe in enumerate(pipes):
                self.register_worker(index, pipe, _process_of(arguments, index))

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
            RuntimeError: a send_async() is pending. ValueError: a worker that is not registered, or no weights.
            ManifestMismatch: the weights do not fit; nobody was changed.
            WorkerDied, AckTimeout: sent, but these workers have not applied it; the others have. The sender stays
            usable, and the dead are left out from now on. An exception of a worker raises here, with its traceback
            as the cause.
        """
        self._refuse_pending("send")
        workers = self._chosen(worker_ids)
        deadline = self._deadline(timeout)
        posted = self._post(weights, workers, deadline)
        self._collect(workers, posted, deadline)
        return self._version

    def send_async(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> int:
        """Send weights and return at once; wait_async() waits. Raises as send() does, but for what workers do."""
        self._refuse_pending("send_async")
        workers = self._chosen(worker_ids)
        self._pending = workers, self._post(weights, workers, self._deadline(timeout))
        return self._version

    def wait_async(self, *, timeout: float | None = None) -> int:
        """Wait for the pending send_async(), and return its version. Raises RuntimeError when none is pending, and
        what send() raises; then nothing is pending any more."""
        if self._pending is None:
            raise RuntimeError("no send is pending; call send_async() first")
        (workers, posted), self._pending = self._pending, None
        self._collect(workers, posted, self._deadline(timeout))
        return self._version

    def update_weights(self, weights: Any) -> int:
        """The same as send(weights)."""
        return self.send(weights)

    # What the kinds of senders do differently.

    def _post(self, weights: Any, workers: list[int], deadline: float) -> Any:
        """Start sending; what _collect() needs."""
        prepared = self._prepared(weights)
        self._version += 1
        transports = self._reached(workers)
        for transport in transports:
            getattr(transport, "send_weights_async", transport.send_weights)(self._model_id, prepared)
        return transports

    def _collect(self, workers: list[int], posted: Any, deadline: float) -> None:
        """Wait for every answer."""
        for transport in posted:
            if hasattr(transport, "send_weights_async") and hasattr(transport, "wait_ack"):
                transport.wait_ack()

    def _deadline(self, timeout: float | None) -> float:
        return 0.0  # the transports have their own

    def _reached(self, workers: Iterable[int]) -> list[Any]:
        if not self._transports and self._transport is not None:
            return [self._transport]
        return [self._transports[index] for index in workers]

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
        known = self.worker_ids
        if worker_ids is None:
            return known
        chosen = [worker_ids] if isinstance(worker_ids, Integral) else list(worker_ids)  # type: ignore[arg-type]
        unknown = [index for index in chosen if index not in known]
        if unknown:
            raise ValueError(f"worker {unknown[0]} is not registered; the registered ones are {known}")
        return sorted({int(index) for index in chosen})

    def __getstate__(self) -> dict[str, Any]:
        # Pipes and contexts belong to this process: a copy has to register its own workers.
        return {
            **self.__dict__,
            "_context_ref": None,
            "_model": None,
            "_pending": None,
            "_transports": {},
            "_transport": None,
        }


def _process_of(arguments: Arguments, index: int) -> Any:
    """A function that gives the worker's process as soon as there is one, or None."""
    procs, context = arguments.get("procs"), arguments.context
    held = None if context is None or getattr(context, "procs", None) is not procs else weakref.ref(context)

    def process() -> Any:
        current = procs if held is None else getattr(held(), "procs", None)
        return current[index] if current is not None and index < len(current) else None

    return process
