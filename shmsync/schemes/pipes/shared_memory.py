"""Weights in shared memory: written once, read by every worker without a copy. The engine behind the schemes' API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from ...engine.outcome import Outcome
from ...engine.pickling import small
from ...engine.publisher import Publication, publish_all
from ...engine.strategy import Form
from ...engine.subscriber import Consistency
from ...engine.timing import check_timeout
from ..api import WeightSyncScheme
from ..publishers import Plan
from . import messages
from .exchange import Link
from .messages import Tag
from .receiver import PipeReceiver
from .sender import PipeSender, Posted
from .shared_transport import SharedMemTransport
from .worker_end import Message


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Weights are written once into shared memory, which every worker maps; the worker's module is bound to it.

    Args:
        policy_weights: plain shared TensorDicts by model id, which every send also writes in place.
        strategy: the form that prepare_weights() extracts. Sends read a module directly.
        auto_register: let the first send of a model register it.
        slots, consistency: of the arenas and of their subscribers; see Publisher and Subscriber.
        groups: worker indices that share an arena, such as [[0, 1], [2, 3]]; None: all share one. A send goes to whole
            groups.
        timeout: default of a send, in seconds; math.inf waits for ever.
        alias: adopt the first module that is sent (Publisher.adopt): the trainer's own parameters become the shared
            memory, and workers see every step of an optimizer as it happens.
    """

    def __init__(
        self,
        policy_weights: dict[str, TensorDictBase] | None = None,
        strategy: Form = "tensordict",
        auto_register: bool = True,
        *,
        slots: int = 1,
        consistency: Consistency = "pinned",
        groups: Sequence[Sequence[int]] | None = None,
        timeout: float = 10.0,
        alias: bool = False,
    ) -> None:
        super().__init__(strategy)
        self.policy_weights = {} if policy_weights is None else policy_weights
        self.auto_register = auto_register
        self.slots = slots
        self.consistency: Consistency = consistency
        self.groups = groups
        self.timeout = check_timeout(timeout)
        self.alias = alias
        self._transport = self._make_transport()

    def _make_transport(self) -> SharedMemTransport:
        return SharedMemTransport(
            self.policy_weights,
            self.auto_register,
            slots=self.slots,
            consistency=self.consistency,
            groups=self.groups,
            timeout=self.timeout,
            alias=self.alias,
        )

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Register a model before its first send; see SharedMemTransport.register_weights()."""
        self._transport.register_weights(model_id, weights)

    def create_transport(self, pipe_or_context: Any) -> SharedMemTransport:
        """The sender's transport, which is one for all workers; with a pipe, that worker is registered. In a worker,
        its receiver's."""
        if self._receiver is not None:
            return self._receiver.transport
        if pipe_or_context is not None:
            self._transport.register_pipe(getattr(pipe_or_context, "pipe", pipe_or_context))
        return self._transport

    def create_sender(self) -> PipeSender:
        """As in WeightSyncScheme."""
        return _Sender(self)

    def create_receiver(self) -> PipeReceiver:
        """As in WeightSyncScheme."""
        return _Receiver(self)

    def shutdown(self) -> None:
        """End the arenas, or leave them."""
        self._transport.close()

    def __getstate__(self) -> dict[str, Any]:
        # What lies in arenas stays here; plain shared TensorDicts are the user's configuration.
        return {**super().__getstate__(), "policy_weights": dict(self._transport._plain), "_transport": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._transport = self._make_transport()


class _Sender(PipeSender):
    _scheme: SharedMemWeightSyncScheme

    def __init__(self, scheme: SharedMemWeightSyncScheme) -> None:
        super().__init__(scheme)
        self._transport = scheme._transport
        self._links = self._transport.links
        # A user's subclass may prepare weights in its own way; else the engine reads a module faster than that.
        self._extracts = type(scheme).prepare_weights is not WeightSyncScheme.prepare_weights

    @property
    def version(self) -> int:
        """As in WeightSender."""
        return max(self._version, self._transport.arenas.version(self._model_id))

    @property
    def worker_ids(self) -> list[int]:
        """As in WeightSender."""
        return sorted(self._links)

    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        """As in WeightSender."""
        self._transport.register_pipe(getattr(pipe_or_context, "pipe", pipe_or_context), worker_idx, process)

    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> int:
        """As in WeightSender. The common case, a module for all workers, has a path of its own."""
        route = self._transport.route(self._model_id) if worker_ids is None and self._pending is None else None
        if route is None or self._extracts:
            return super().send(weights, worker_ids, timeout=timeout)
        source = self._source(weights)
        if not isinstance(source, nn.Module):
            return super().send(source, timeout=timeout)
        deadline = self._deadline(timeout)
        publisher, optional = route.publisher, route.optional
        (version,) = publish_all([Publication(publisher, source, optional)], None, deadline)
        self._version = version
        tag = Tag(self._model_id, version)
        sent = small(((self._model_id, version), messages.UPDATE))
        late = route.exchange(sent, small(((self._model_id, version), messages.UPDATED)), tag, deadline)
        if late:
            links = {index: self._links[index] for index in late}
            self._collect(late, Posted(version, links, {index: [tag] for index in late}), deadline)
        return version

    def set_up(self, arguments: Any) -> None:
        """As in WeightSender; weights that are known already are registered with the workers."""
        arguments.needed("pipes")
        super().set_up(arguments)
        cached = arguments.get("cached_weights")
        get_cached = getattr(arguments.context, "get_cached_weights", None)
        if cached is None and callable(get_cached):
            cached = get_cached(self._model_id)
        if cached is not None and self._model_id not in self._transport._plain:
            self._transport.register_weights(self._model_id, cached)
        elif self._model_id in self._transport._plain and self._links:
            self._transport.open(self._model_id)

    def _mark(self, outcome: Outcome) -> None:
        # A forward may use a version before receive() answers for it, so a worker may finish its work and leave with
        # the version applied and not answered.
        for index in list(outcome.dead):
            group = self._transport.arenas.group_of(index)
            if self._links[index].finished and self._transport.arenas.applied(self._model_id, group, index):
                del outcome.dead[index]
                outcome.done.append(index)
                self._links[index].reported = True  # it needs no more weights
        super()._mark(outcome)

    def _plan(self, weights: Any, links: Mapping[int, Link], version: int) -> Plan:
        source = self._prepared(weights) if self._extracts else self._source(weights)
        return self._transport.plan(self._model_id, source, links, version)

    def _send_version(self, links: Mapping[int, Link]) -> dict[int, list[Tag]]:
        return self._transport.announce(self._model_id, links)


class _Receiver(PipeReceiver):
    _scheme: SharedMemWeightSyncScheme
    _transport: SharedMemTransport

    def _make_transport(self, pipe: Any) -> SharedMemTransport:
        transport = self._scheme._make_transport()
        transport.pipe = pipe
        return transport

    @property
    def version(self) -> int:
        """As in WeightReceiver. Between two calls of receive() it may move on: each forward uses the newest."""
        subscriber = self._transport and self._transport.subscriptions.get(self._model_id)
        return subscriber.version if subscriber else 0

    def apply_weights(self, weights: Any) -> None:
        """As in WeightReceiver."""
        subscriptions = self._transport.subscriptions
        subscriber = subscriptions.get(self._model_id)
        if subscriber is not None and weights is subscriber.weights:
            subscriptions.bind(self._model_id, self._resolve_model())
            self._transport.send_ack(messages.UPDATED)
        else:
            super().apply_weights(weights)

    def close(self) -> None:
        """Leave the arenas; a bound model raises ClosedError when it is called from now on."""
        self._transport.close()

    def _ready(self) -> bool:
        return not self._transport.subscriptions.inside_section(self._model_id)

    def _attach(self, message: Message) -> None:
        self._transport.subscriptions.join(message.model_id, message.content, message.worker)
        self._transport.subscriptions.bind(message.model_id, self._resolve_model())

    def _check(self, message: Message) -> None:
        if not isinstance(message.content, int):
            raise ValueError(f"weights of {message.model_id!r} came through the pipe; use this scheme on both sides")
        self._transport.subscriptions.needed(message.model_id)

    def _use(self, message: Message) -> None:
        self._transport.subscriptions.use(message.model_id, message.content, self._resolve_model())
