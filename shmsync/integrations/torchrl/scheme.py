"""The scheme that TorchRL's collectors take: their hooks on one side, the engine on the other."""

from __future__ import annotations

import weakref
from typing import Any, Literal

from torchrl.weight_update import weight_sync_schemes as _torchrl

from ...engine.deadlines import timeout_or_default, timeout_or_none
from ...engine.source.dtypes import Dtypes, check_dtypes
from ...errors import ClosedError, ProtocolError
from ...memory.process import close_in_children
from ...schemes.devices import DeviceChoice, device_names
from .receiver import Receiver
from .sender import Sender
from .weights import first_weights, resolve

NOT_DISTRIBUTED = (
    "ShmWeightSyncScheme shares memory with the processes that MultiSyncCollector and MultiAsyncCollector start; a {} "
    "takes RayWeightSyncScheme(), RPCWeightSyncScheme() or DistributedWeightSyncScheme() of torchrl.weight_update"
)


class ShmWeightSyncScheme(_torchrl.WeightSyncScheme):
    """Sends the weights of one model to the workers of a TorchRL collector through shared memory.

    `weight_sync_schemes={"policy": ShmWeightSyncScheme()}`. The weights lie in one arena, which every worker maps;
    each worker's policy is bound to it, and moves to a new version between two forwards, never in one. An update
    returns when every worker has applied it.

    Args:
        strategy: "tensordict" or "state_dict", as in TorchRL; sends read a module directly either way, except that
            "state_dict" merges adapters of a PEFT model (merge_and_unload), as TorchRL's does.
        sync: let an update wait until the workers have applied it. False: it returns when the weights are published.
        per_worker_weights: give each worker its own arena, so that an update can be for some of them, or different
            for each. Without it an update is for all workers on a device.
        slots: 1: an update waits for forwards that are under way, and forwards for the copy. 2 or more: neither
            waits, for that much more memory.
        timeout: of an update, in seconds; math.inf waits without limit, None is 10.
        dtype: floating weights are cast to it before workers see them, for workers whose policies have that dtype; a
            mapping of glob patterns on dotted keys to dtypes casts those that match. Without it weights of another
            dtype than the policy's are refused.
        strict: refuse weights that the policy has no place for. False: leave those out, as of an actor-critic's
            weights for an actor; some must fit, and what fits must have the right shape.
        device: where the weights lie: one device for all workers, or a list or tuple with one for each, None for the
            host's memory. Workers on one device share one arena there. None: where the collector's policy_device says
            that their policies are; where no arena can lie, in the host's memory, and each worker has a copy.

    An update raises ManifestMismatch (a ValueError; nothing was published), a worker's own exception, WorkerDied, or
    AckTimeout and ReaderStalled (TimeoutErrors).
    """

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        slots: int = 1,
        timeout: float | None = None,
        dtype: Dtypes = None,
        device: DeviceChoice = None,
        strict: bool = True,
    ) -> None:
        super().__init__(strategy)
        if not isinstance(strict, bool):
            raise TypeError(f"strict is True or False, not {strict!r}")
        check_dtypes(dtype)
        device_names(device)  # or raise
        self.device = device
        self.sync = sync
        self.per_worker_weights = per_worker_weights
        self.slots = slots
        self.timeout = timeout_or_default(timeout)
        self.dtype = dtype
        self.strict = strict
        self._invitation: tuple[str, dict[int, str]] | None = None  # the trainer's address, arena names by worker

    # Not in __init__: one that refuses its arguments is collected too, and shut down then.
    _sender: Sender | None = None
    _receiver: Receiver | None = None

    # The trainer

    def _init_on_sender_impl(
        self, *, model_id: str | None = None, context: Any = None, ctx: Any = None, **given: Any
    ) -> None:
        """Take the first weights, in each form that SharedMemWeightSyncScheme takes. connect() copies their values.

        Raises ProtocolError for a collector of one process, and for one over Ray, RPC or torch.distributed.
        """
        if any(kind.__module__.startswith("torchrl.collectors.distributed") for kind in type(context).__mro__):
            raise ProtocolError(NOT_DISTRIBUTED.format(type(context).__name__))
        if context is not None and getattr(context, "num_workers", None) is None:
            raise ProtocolError(
                f"a {type(context).__name__} of one process is its own worker: leave weight_sync_schemes= out, its "
                "update_policy_weights_() needs none. weight_recv_schemes= takes a scheme that another process sends to"
            )
        close_in_children(self, lambda scheme: scheme.__setstate__(scheme.__getstate__()))  # there it is as if pickled
        self.model_id, self.context = model_id, context
        first = first_weights(model_id=model_id, context=context, **given)
        self.per_worker_weights = self.per_worker_weights or first.apart
        self._sender = Sender(
            model_id or "policy",
            first,
            self.device,
            apart=self.per_worker_weights,
            options={"slots": self.slots, "timeout": self.timeout, "dtype": self.dtype},
            strict=self.strict,
            strategy=self._strategy,
            context=self._context_ref,
        )
        self._invitation = self._sender.failures.address, self._sender.names

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        """Make the arenas, and wait for no worker: workers find them by name."""
        sender = self._open_sender()
        sender.open()
        if weights is not None:
            sender.send(weights, None, wait=False)

    def _open_sender(self) -> Sender:
        if self._sender is None:
            raise ClosedError(
                "this ShmWeightSyncScheme was shut down; give each collector its own scheme: a new one, or a copy, "
                "pickle.loads(pickle.dumps(scheme))"
            )
        return self._sender

    def send(self, weights: Any = None, worker_ids: Any = None, *, timeout: float | None = None) -> int:
        """Publish weights, and (with sync) wait until the workers have applied them. Returns the newest version.

        Args:
            weights: a module, a TensorDict, a state dict, or a dict of worker index to such weights. They may be
                partial. None: the collector's policy, or what the scheme was initialised with; after an update with
                other weights that one again, until the policy changes.
            worker_ids: None (all), an index, a device, or a list of these.
            timeout: in seconds; None is the scheme's.

        Raises as the class says; RuntimeError before init_on_sender() and connect(); ValueError for unknown workers,
        and for an update of some of the workers that share their weights.
        """
        if not self.initialized_on_sender:
            raise RuntimeError("Must be initialized on sender before sending weights: call init_on_sender()")
        if not self.synchronized_on_sender:
            raise RuntimeError("Must be synchronized on sender before sending weights: call connect()")
        return self._open_sender().send(weights, worker_ids, wait=self.sync, timeout=timeout_or_none(timeout))

    # A worker

    def _init_on_receiver_impl(
        self, *, model_id: str | None = None, context: Any = None, model: Any = None, worker_idx: int | None = None
    ) -> None:
        """Learn this worker's model and index, from the arguments or from the collector."""
        if context is not None:
            model = resolve(context, model_id or "policy") if model is None else model
            worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
            self.context = context  # else one that was set before stays, as an InferenceServer does it
        self.model_id = model_id
        self._model_ref = None if model is None else weakref.ref(model)
        self.worker_idx = worker_idx

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        """Find the arena, and bind the model to it. The weights are there when this returns."""
        if self._invitation is None:
            raise RuntimeError(
                "this scheme was not initialised in the trainer before it was given to the worker. "
                + NOT_DISTRIBUTED.format("collector over Ray, RPC or torch.distributed")
            )
        address, names = self._invitation
        worker = self._worker_idx if worker_idx is None else worker_idx
        if worker is None and len(names) == 1:
            worker = next(iter(names))
        if worker not in names:
            raise RuntimeError(f"worker_idx is {worker}, but the trainer expects workers {sorted(names)}")
        self._receiver = Receiver(address, names[worker], worker, self.model)
        self._receiver.tell(self.context, self._model_id or "policy")
        self._start_background_receiver()

    def _background_receive_loop(self) -> None:
        """TorchRL's thread: apply what comes while no forward begins, so that the trainer gets its ack."""
        assert self._receiver is not None and self._stop_event is not None
        self._receiver.apply_each_until(self._stop_event)

    def receive(self, timeout: float | None = 0.0) -> Any:
        """Apply newer weights now, if there are any, and return them, or None. A collector needs no such call.

        Waits `timeout` seconds for newer ones; None: without limit. Raises RuntimeError before connect().
        """
        if self._receiver is None:
            raise RuntimeError("Must be initialized on receiver before receiving weights: call connect()")
        return self._receiver.receive(timeout_or_none(timeout))

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Give this worker's model private weights, until the next update. It keeps its Parameter objects in any case.

        Raises RuntimeError before connect().
        """
        if self._receiver is None:
            raise RuntimeError("apply_weights() is called on the receiver, after connect()")
        self._receiver.load_private(weights)

    @_torchrl.WeightSyncScheme.model.setter
    def model(self, model: Any) -> None:
        """The model that is synchronised; setting it binds the new one."""
        if model is not None and self._receiver is not None:
            self._receiver.bind(model)
        _torchrl.WeightSyncScheme.model.fset(self, model)

    @_torchrl.WeightSyncScheme.context.setter
    def context(self, context: Any) -> None:
        """The collector, held weakly."""
        _torchrl.WeightSyncScheme.context.fset(self, context)
        if self._receiver is not None:
            self._receiver.tell(context, self._model_id or "policy")

    # Both

    @property
    def weights(self) -> Any:
        """The newest weights as a TensorDict of views, read-only; they change with the next version."""
        if self._receiver is not None:
            return self._receiver.weights
        if self._sender is not None and self.synchronized_on_sender:
            return self._sender.weights
        return _torchrl.WeightSyncScheme.weights.fget(self)

    def create_transport(self, **kwargs: Any) -> Any:
        """Raises ProtocolError: workers map the weights, so nothing has to carry them. TorchRL asks for this method."""
        raise ProtocolError("ShmWeightSyncScheme has no transport, since workers map the weights; call send()")

    def shutdown(self) -> None:
        """End the arenas; in a worker, leave them: the model keeps its weights. Idempotent; runs when collected too."""
        super().shutdown()
        if self._receiver is not None:
            self._receiver.close()
        if self._sender is not None:
            self._sender.close()
        self._sender = self._receiver = None  # not before: a call that raised WriterBusy can be made again

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_sender": None, "_receiver": None}  # they stay here
