"""Weights in shared memory: written once, read by every worker without a copy. The engine behind the schemes' API."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from typing_extensions import override

from ...engine.deadlines import check_worker, deadline_after, timeout_or_default
from ...engine.source.dtypes import Dtypes
from ...engine.subscriber import Consistency, reader_of
from ..api import WeightSyncScheme
from ..arenas.publishers import ArenaOptions, Publishers
from ..arenas.subscriptions import Subscriptions
from ..arenas.worker_devices import DeviceChoice, WorkerDevices, devices_for
from ..link import messages
from ..link.messages import Message
from ..link.send_lock import hold_all
from ..link.sender_end import Link
from ..strategy import Form
from .pipe_receiver import PipeReceiver
from .pipe_sender import PipeSender
from .pipe_transport import PipeTransport
from .shared_carrier import SharedMemCarrier

_OPTIONS = ("slots", "consistency", "groups", "timeout", "partial", "dtype")  # of a transport


class SharedMemTransport(PipeTransport):
    """Weights in arenas, and small messages about them over pipes; see PipeTransport.

    One for all workers in the trainer, one in each worker. Its arguments are those of SharedMemWeightSyncScheme.
    """

    carrier: SharedMemCarrier

    def __init__(
        self,
        policy_weights: dict[str, TensorDictBase] | None = None,
        auto_register: bool = True,
        *,
        slots: int = 1,
        consistency: Consistency = "pinned",
        groups: Sequence[Sequence[int]] | None = None,
        timeout: float | None = None,
        partial: bool = False,
        dtype: Dtypes = None,
        device: DeviceChoice | WorkerDevices = None,
    ) -> None:
        timeout = timeout_or_default(timeout)
        options = ArenaOptions(
            slots=slots,
            timeout=timeout,
            groups=groups,
            partial=partial,
            dtype=dtype,
            device=device,
        )
        publishers = Publishers(options)
        self.policy_weights = {} if policy_weights is None else policy_weights
        super().__init__(None, timeout, SharedMemCarrier(publishers, self.policy_weights, auto_register))
        self.subscriptions = Subscriptions(consistency=consistency, timeout=timeout, partial=partial)

    def register_pipe(self, pipe: Any, worker_idx: int | None = None, process: Any = None) -> int:
        """Reach a worker over this pipe; the index it has from now on.

        Args:
            pipe: to the worker.
            worker_idx: its index; None: the next one.
            process: as in WeightSender.register_worker().
        """
        links = self.carrier.links
        if worker_idx is None:  # the one that it has already, or the next
            worker_idx = next((i for i, link in links.items() if link.pipe is pipe), max(links, default=-1) + 1)
        worker_idx = check_worker(worker_idx)
        self.carrier.add(worker_idx, pipe, process)
        return worker_idx

    def register_weights(self, model_id: str, weights: Any) -> None:
        """Register the weights of model_id before its first send; see SharedMemCarrier.register_weights()."""
        self.carrier.register_weights(model_id, weights)

    @override
    def _links(self) -> dict[int, Link]:
        return self.carrier.living()

    @override
    def wait_ack(self) -> None:
        if not self._posted:
            raise RuntimeError("no send is pending; call send_weights_async() first")
        super().wait_ack()

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """In the worker: the next version of any model, as (model_id, zero-copy TensorDict); None if none came.

        Protected only inside a read section. send_ack() answers; registrations are answered by themselves.
        """
        kinds, deadline = (messages.UPDATE, messages.REGISTER), deadline_after(timeout, self.timeout)
        while (message := self.end.take(kinds, deadline)) is not None:
            if message.kind == messages.UPDATE:
                subscriber = self.subscriptions.needed(message.model_id)
                self.subscriptions.move_to(subscriber, message.content)
                return message.model_id, subscriber.weights
            self.subscriptions.join(message.model_id, message.content, message.worker)
            self.send_ack(messages.REGISTERED)
        return None

    def close(self) -> None:
        """End the arenas, or leave them. Idempotent."""
        self.carrier.close()
        self.subscriptions.close()


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Weights are written once into shared memory, which every worker maps; the worker's module is bound to it.

    Args:
        policy_weights: plain shared TensorDicts by model id, which every send also writes in place.
        strategy: the form that prepare_weights() extracts. Sends read a module directly.
        auto_register: let the first send of a model register it.
        slots: of the arenas; see Publisher.
        consistency: of the workers' subscribers; see Subscriber.
        groups: worker indices that share an arena, such as [[0, 1], [2, 3]]; None: all share one. A send goes to whole
            groups.
        timeout: default of a send, in seconds; math.inf waits without limit, None is 10.
        device: where the weights lie: "cpu", as with None, or a device that all workers see, as "cuda:0". A list or
            tuple names the device of each worker, None for the host's memory: each device has one arena, which all
            workers on it share. A worker's module on another device gets a private copy of each version.
        partial: see WeightSyncScheme. The first weights that are sent make the arena; with partial=True the worker's
            module may have other leaves besides, which stay its own. Leaves that a send lacks keep the values of the
            newest version.
        dtype: see WeightSyncScheme.
    """

    sender_takes = WeightSyncScheme.sender_takes | {"procs", "cached_weights", "device"}

    def __init__(
        self,
        policy_weights: dict[str, TensorDictBase] | None = None,
        strategy: Form = "tensordict",
        auto_register: bool = True,
        *,
        slots: int = 1,
        consistency: Consistency = "pinned",
        groups: Sequence[Sequence[int]] | None = None,
        timeout: float | None = None,
        partial: bool = False,
        dtype: Dtypes = None,
        device: DeviceChoice = None,
    ) -> None:
        super().__init__(strategy, partial=partial, dtype=dtype)
        self.policy_weights = {} if policy_weights is None else policy_weights
        self.auto_register = auto_register
        self.slots = slots
        self.consistency: Consistency = consistency
        self.groups = groups
        self.timeout = timeout_or_default(timeout)
        self.device = device
        self._devices = WorkerDevices(device)
        self._transport = self.make_transport()

    def make_transport(self) -> SharedMemTransport:
        """A new transport with this scheme's options, for either side."""
        options: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS}
        return SharedMemTransport(self.policy_weights, self.auto_register, device=self._devices, **options)

    def create_carrier(self) -> SharedMemCarrier:
        """What senders send with: one for all models."""
        return self._transport.carrier

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Register the weights of model_id before its first send; see SharedMemCarrier.register_weights()."""
        self._transport.register_weights(model_id, weights)

    @override
    def create_transport(self, pipe_or_context: Any) -> SharedMemTransport:
        """The trainer's, one for all workers; with a pipe, that worker is registered. In a worker, its receiver's."""
        if self._receiver is not None:
            return self._receiver.transport
        if pipe_or_context is not None:
            self._transport.register_pipe(getattr(pipe_or_context, "pipe", pipe_or_context))
        return self._transport

    @override
    def create_sender(self) -> PipeSender:
        return SharedMemSender(self)

    @override
    def create_receiver(self) -> PipeReceiver:
        return SharedMemReceiver(self)

    @override
    def shutdown(self) -> None:
        super().shutdown()
        self._transport.close()

    def __getstate__(self) -> dict[str, Any]:
        # What lies in arenas stays here; plain shared TensorDicts are the user's configuration.
        return {**super().__getstate__(), "policy_weights": dict(self._transport.carrier.plain), "_transport": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._transport = self.make_transport()


class SharedMemSender(PipeSender):
    """Writes weights into the arenas of its scheme."""

    carrier: SharedMemCarrier

    def __init__(self, scheme: SharedMemWeightSyncScheme) -> None:
        super().__init__(scheme)
        self._plain = not (scheme.prepares or self._picks or scheme.partial)  # may it be the common case?

    @override
    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> int:
        common = worker_ids is None and not self._pending and self._plain
        if not common or not self.carrier.is_common(self._model_id):
            return super().send(weights, worker_ids, timeout=timeout)
        source = weights if isinstance(weights, nn.Module) else self._source(weights)
        if not isinstance(source, (nn.Module, TensorDictBase, dict)):
            return super().send(source, timeout=timeout)
        deadline = deadline_after(timeout, self.default_timeout)
        with hold_all(self.send_locks(), deadline, "send"):
            self.check_ready("send")
            if self.carrier.is_common(self._model_id):  # still, now that this thread has the lock
                posted = self.carrier.post_common(self._model_id, source, deadline)
                if posted.links:
                    self.carrier.collect(posted, deadline)
                return posted.version
        return super().send(source, timeout=max(0.0, deadline - time.monotonic()))

    @override
    def sent_weights(self, weights: Any) -> Any:
        # A user's subclass may prepare weights in its own way; else the engine reads a module faster than that.
        return super().sent_weights(weights) if self._scheme.prepares else self._source(weights)

    @override
    def set_up(self, arguments: Any) -> None:
        """Weights that are known already are registered with the workers, and `device=` places those of the scheme."""
        devices = devices_for(arguments.given("device"))
        devices.check_workers(len(arguments.needed("pipes")))
        self.carrier.publishers.place(devices)
        self.carrier.set_up(arguments.model_id, arguments.needed("pipes"))
        super().set_up(arguments)
        cached = arguments.get("cached_weights")
        get_cached = getattr(arguments.context, "get_cached_weights", None)
        if cached is None and callable(get_cached):
            cached = get_cached(self.model_id)
        if cached is not None and self.model_id not in self.carrier.plain:
            self.carrier.register_weights(self.model_id, cached)
        elif self.model_id in self.carrier.plain and self.carrier.links:
            self.carrier.open(self.model_id)


class SharedMemReceiver(PipeReceiver):
    """Binds the model to the arena, and moves it to each version that is announced."""

    _scheme: SharedMemWeightSyncScheme
    _transport: Any  # a SharedMemTransport, but None in a copy

    @override
    def _make_transport(self, pipe: Any) -> SharedMemTransport:
        transport = self._scheme.make_transport()
        transport.pipe = pipe
        return transport

    @property
    @override
    def version(self) -> int:
        """The version of the calling thread's last forward or receive(), whichever came last; else the applied one.

        Each forward uses the newest, so it may move on between two calls of receive().
        """
        subscriber = self._transport and self._transport.subscriptions.get(self._model_id)
        return subscriber.version if subscriber else 0

    @override
    def _use_given(self, message: Message) -> None:
        subscriptions, content = self._transport.subscriptions, message.content
        subscriber = subscriptions.get(self._model_id)
        if isinstance(content, int):
            super()._use_given(message)
        elif subscriber is not None and content is subscriber.weights:  # of SharedMemTransport.receive_weights()
            subscriptions.bind(self._model_id, self._resolve_model_ref())
        else:
            self._strategy.apply_weights(self._resolve_model_ref(), content)

    @override
    def close(self) -> None:
        """Leave the arenas; a bound model raises ClosedError when it is called from now on."""
        if self._transport is not None:  # a copy has none
            self._transport.close()

    @override
    def _ready(self) -> bool:
        return not self._transport.subscriptions.inside_section(self._model_id)

    @override
    def _attach(self, message: Message) -> None:
        worker = self._worker_idx if message.worker is None else message.worker
        self._transport.subscriptions.join(message.model_id, message.content, worker)
        self._transport.subscriptions.bind(message.model_id, self._resolve_model_ref())

    @override
    def _checked(self, message: Message) -> Callable[[], None]:
        if not isinstance(message.content, int):
            raise ValueError(f"weights of {message.model_id!r} came through the pipe; use this scheme on both sides")
        subscriptions = self._transport.subscriptions
        subscriptions.needed(message.model_id)
        return partial(subscriptions.use, message.model_id, message.content, self._resolve_model_ref())

    @override
    def _use_news(self) -> None:
        subscriber = self._transport.subscriptions.get(self._model_id)
        if subscriber is not None:
            reader_of(subscriber).use_applied_version()
