"""The weight-sync API: a scheme says how one model is synchronised, and makes its sender and its receivers.

One sender or receiver for each model, one transport for each worker. The shape is that of TorchRL's API.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, ClassVar, Protocol, runtime_checkable

from typing_extensions import Self

from ..engine.source.dtypes import Dtypes
from ..errors import ClosedError
from .context import Arguments, find_source
from .receiver import WeightReceiver
from .sender import WeightSender
from .strategy import Form, WeightStrategy

_BACKENDS = {
    "none": "NoWeightSyncScheme",
    "shared": "SharedMemWeightSyncScheme",
    "process": "MultiProcessWeightSyncScheme",
    "multiprocessing": "MultiProcessWeightSyncScheme",
    "distributed": "DistributedWeightSyncScheme",
    "rpc": "RPCWeightSyncScheme",
    "ray": "RayWeightSyncScheme",
}


@runtime_checkable
class TransportBackend(Protocol):
    """How weights get to one worker.

    These methods make one. Optional: `send_weights_async`, `wait_ack`, `send_ack(message="updated")`,
    `check_ack(message="updated")`, `check_connection()`.

    A send calls them directly, on its own thread: time-outs, and late answers, are the transport's own matter.
    """

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send weights of the model `model_id`, and wait until the worker has applied them."""

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        """In the worker: (model_id, weights), or None when nothing came within `timeout` seconds."""


class WeightSyncScheme(ABC):
    """How one model is synchronised between a sender and its workers.

    Args:
        strategy: the form in which weights are extracted, "state_dict" or "tensordict".
        partial: weights may lack leaves; only those that are given change. Others are refused by name.
        dtype: floating parameters are cast to it before they travel; a mapping of glob patterns on dotted keys to
            dtypes casts those that match. As in Publisher.

    A scheme is made once, and given to both sides: `init_on_sender` in the trainer, `init_on_worker` in each worker.
    Pickling keeps its configuration alone. `with scheme:` ends with shutdown(), and so the scheme's use.
    """

    _for_torchrl: ClassVar[str] = (  # what to give TorchRL's collectors instead
        "Give MultiSyncCollector and MultiAsyncCollector shmsync.integrations.torchrl.ShmWeightSyncScheme(), "
        "RayCollector, RPCCollector and DistributedCollector the RayWeightSyncScheme(), RPCWeightSyncScheme() and "
        "DistributedWeightSyncScheme() of torchrl.weight_update, and a Collector none"
    )
    _over = False

    def __init__(self, strategy: Form = "state_dict", *, partial: bool = False, dtype: Dtypes = None) -> None:
        self.strategy = strategy
        self.partial = partial
        self.dtype = dtype
        self.make_strategy()  # refuses wrong arguments now, not at the first send
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """The scheme of a way of starting workers.

        Args:
            backend: "none", "shared", "process" (or "multiprocessing"), "distributed", "rpc" or "ray".
            **options: of that scheme.

        Raises ValueError for another name.
        """
        from shmsync import schemes

        if backend not in _BACKENDS:
            raise ValueError(f"backend is one of {', '.join(map(repr, _BACKENDS))}, not {backend!r}")
        return getattr(schemes, _BACKENDS[backend])(**options)

    def init_on_sender(self, model_id: str = "policy", context: Any = None, **kwargs: Any) -> None:
        """Prepare to send the model of this id.

        Args:
            model_id: a path such as "policy", "env.value_net", "env.transform[0]".
            context: over pipes it gives `.pipes` (one end of a Pipe for each worker), `.num_workers`,
                `.get_model(model_id)`, `.get_cached_weights(model_id)` and `.procs` (the workers' processes, started
                or not). Held weakly. For what other schemes take and raise see their classes.
            **kwargs: the same names, instead of a context or beside it; `model` and `cached_weights`, which win over
                what the context has. A keyword of the API that this scheme does not use is ignored.

        Raises ValueError for missing or contradictory ones, TypeError for unknown ones, ClosedError after shutdown(),
        ProtocolError for a collector of TorchRL's, whose workers need a scheme of another kind.
        """
        self.check_open("init_on_sender")
        arguments = Arguments(self, "init_on_sender", model_id, context, kwargs, self._for_torchrl)
        sender = self.create_sender()
        sender.set_up(arguments)
        self._sender = sender

    def init_on_worker(self, model_id: str = "policy", context: Any = None, **kwargs: Any) -> None:
        """Prepare to receive the model of this id.

        Args:
            model_id: see init_on_sender().
            context: over pipes it gives `.pipe` (the worker's end) and `.get_model(model_id)`. Held weakly.
            **kwargs: `pipe`, `model` instead, or beside it; for other schemes see their classes. `worker_idx`: the
                index by which errors name this worker where its sender has given it none. `wait`: seconds to wait for
                the first weights.

        Raises ValueError for missing ones, TypeError for unknown ones, ClosedError after shutdown(), TimeoutError when
        no weights came while it waited.
        """
        self.check_open("init_on_worker")
        arguments = Arguments(self, "init_on_worker", model_id, context, kwargs)
        receiver = self.create_receiver()
        receiver.set_up(arguments)
        self._receiver = receiver

    init_on_receiver = init_on_worker

    @property
    def _initialized_on_sender(self) -> bool:
        return self._sender is not None

    @property
    def _initialized_on_worker(self) -> bool:
        return self._receiver is not None

    def get_sender(self) -> WeightSender:
        """The sender; RuntimeError before init_on_sender(), ClosedError after shutdown()."""
        self.check_open("get_sender")
        if self._sender is None:
            raise RuntimeError(f"call init_on_sender() before get_sender() on this {type(self).__name__}")
        return self._sender

    def get_receiver(self) -> WeightReceiver:
        """The receiver; RuntimeError before init_on_worker(), ClosedError after shutdown()."""
        self.check_open("get_receiver")
        if self._receiver is None:
            raise RuntimeError(f"call init_on_worker() before get_receiver() on this {type(self).__name__}")
        return self._receiver

    # ---- the newer spelling

    def send(self, weights: Any = None, worker_ids: Any = None, **options: Any) -> int:
        """get_sender().send()."""
        return self.get_sender().send(weights, worker_ids, **options)

    def receive(self, timeout: float | None = 0.001) -> bool:
        """get_receiver().receive()."""
        return self.get_receiver().receive(timeout)

    def apply_weights(self, weights: Any) -> None:
        """get_receiver().apply_weights()."""
        self.get_receiver().apply_weights(weights)

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Bring the first weights to the workers; each side calls it after its init, once the workers run.

        The sender sends `weights`, or those that it knows, and waits for all workers; a worker waits until they came.
        Raises TimeoutError in a worker to which none came in the scheme's time, RuntimeError before an init.
        """
        if self._sender is not None:
            self._sender.connect(weights)
        elif not self.get_receiver().receive(None):
            raise TimeoutError("no weights came in time; call connect() on the sender too, with weights to send")

    # ---- what subclasses make

    @abstractmethod
    def create_transport(self, pipe_or_context: Any) -> TransportBackend:
        """The transport to one worker.

        Args:
            pipe_or_context: the pipe to it, or a context that has `.pipe`; None in schemes that need none.
        """

    def create_sender(self) -> WeightSender:
        """A sender that knows no worker yet."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """A receiver that has no model yet."""
        return WeightReceiver(self)

    def make_strategy(self) -> WeightStrategy:
        """A strategy with this scheme's options, for either side."""
        return WeightStrategy(self.strategy, partial=self.partial, dtype=self.dtype)

    def prepare_weights(self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None) -> Any:
        """What a send of `weights` transports, in the form that `strategy` gives it.

        Args:
            weights: a module is extracted; a string is a model id, resolved in the context; None is the cached weights
                that init_on_sender() or the context gave, else extracted from the model that init_on_sender() got, else
                from the context's model of this id, for "policy" else from its `_fallback_policy`, and None when there
                is none of these. Anything else stays as it is.
            model_id: of the model.
            strategy: extracts.
            context: where models are found.

        A subclass may supply the weights itself: it gets what was passed to send(), None and strings too, and what it
        returns is what travels, in every scheme.

        Raises ValueError for a string without a context, and for one under which the context has no model.
        """
        sender = self._sender if self._sender is not None and self._sender.model_id == model_id else None
        cached, model = (None, None) if sender is None else (sender._cached, sender._model)
        return strategy.prepared(find_source(weights, model_id, context, cached, model))

    @property
    def _prepares(self) -> bool:
        """Does a subclass, or this object, prepare weights in its own way?"""
        return getattr(self.prepare_weights, "__func__", None) is not WeightSyncScheme.prepare_weights

    # ---- its life

    def check_open(self, call: str) -> None:
        """Raise ClosedError after shutdown(); `call` is its first word."""
        if self._over:
            kind = type(self).__name__
            raise ClosedError(f"{call}: this {kind} was shut down, and what it held is gone; make a new one")

    def shutdown(self) -> None:
        """Give back what the scheme holds. Idempotent; it also happens when the scheme is collected, and at exit.

        Every later use of the scheme is a ClosedError.
        """
        self._over = True

    def __getattr__(self, name: str) -> Any:
        # Only what is not there comes here. TorchRL's collectors ask their schemes for these first.
        kind = type(self).__name__
        if name.startswith(("initialized_on_", "synchronized_on_")):
            raise AttributeError(
                f"{kind} has no {name}, which TorchRL's collectors need of their schemes: it is a scheme for workers "
                f"of your own. {self._for_torchrl}"
            )
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    def __enter__(self) -> Self:
        self.check_open("with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.shutdown()
        except Exception:
            if error is None:
                raise
            # The caller's own error tells more.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sender": None, "_receiver": None, "_over": False}
