"""Weights in shared memory: written once, read by every worker without a copy. The engine behind the schemes' API."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from .._arguments import check_timeout, deadline_after
from ..errors import ClosedError
from ..strategy import Form, WeightStrategy
from ..subscriber import Consistency
from . import _wire
from ._arenas import ALL, Arenas
from ._base import WeightSyncScheme
from ._exchange import Link, Outcome, gather
from ._inbox import Message
from ._pipe_receiver import PipeReceiver
from ._pipe_sender import PipeSender, Plan, Posted, write
from ._route import Route
from ._subscriptions import Subscriptions
from ._transport import PipeTransport
from ._wire import Tag

_STRATEGY = WeightStrategy()


class SharedMemTransport(PipeTransport):
    """Weights in arenas, and small messages about them over pipes. One for all workers on the sender's side; one for
    each worker on the other.

    Args:
        policy_weights: plain shared TensorDicts by model id, which every send also writes in place.
        auto_register: let the first send of a model register it.
        slots, consistency: of the arenas and of their subscribers; see Publisher and Subscriber.
        groups: worker indices that share an arena, such as [[0, 1], [2, 3]]; None: all share one.
        timeout: default of a send, in seconds.
        alias: adopt the first module that is sent: its own parameters become the shared memory.
    """

    def __init__(
        self,
        policy_weights: dict[str, TensorDictBase] | None = None,
        auto_register: bool = True,
        *,
        slots: int = 1,
        consistency: Consistency = "pinned",
        groups: Sequence[Sequence[int]] | None = None,
        timeout: float = 10.0,
        alias: bool = False,
    ) -> None:
        super().__init__(None, timeout)
        self.policy_weights: dict[str, Any] = {} if policy_weights is None else policy_weights
        self.auto_register = auto_register
        self.arenas = Arenas(slots=slots, groups=groups, timeout=timeout, alias=alias)
        self.subscriptions = Subscriptions(consistency=consistency, timeout=timeout)
        self.links: dict[int, Link] = {}
        self._plain = dict(self.policy_weights)  # those that are the user's own memory
        self._joined: dict[str, dict[int, Link]] = {}  # who was told where the arena is
        self._unconfirmed: dict[str, set[int]] = {}
        self._routes: dict[str, Route] = {}
        self._closed = False
        self._async: tuple[str, int, dict[int, list[Tag]]] | None = None

    # The sender's side.

    def register_pipe(self, pipe: Any, worker_idx: int | None = None, process: Any = None) -> int:
        """Reach a worker over this pipe; the index it has from now on."""
        index = (
            next((i for i, link in self.links.items() if link.pipe is pipe), None) if worker_idx is None else worker_idx
        )
        if index is None:
            index = max(self.links, default=-1) + 1
        self.arenas.group_of(index)
        known = self.links.get(index)
        if known is None or known.pipe is not pipe or process is not None:
            self.links[index] = Link(pipe, process)
        return index

    def register_weights(self, model_id: str, weights: Any) -> None:
        """Register a model before its first send: `weights` are its version 1. A plain shared TensorDict is written in
        place by every send. Known workers are told at once, and their answers awaited by the first send.

        Raises RuntimeError when the model is registered, ValueError for weights that are no TensorDict.
        """
        if model_id in self._plain or self.arenas.version(model_id):
            raise RuntimeError(f"{model_id!r} is registered already; its layout is fixed, so send() new values for it")
        if not isinstance(weights, TensorDictBase):
            raise ValueError(f"weights to register are a TensorDict, not a {type(weights).__name__}")
        self.policy_weights[model_id] = self._plain[model_id] = weights
        if self.links:
            self.open(model_id)

    def open(self, model_id: str) -> None:
        """Make the arena of registered weights, and tell the workers."""
        if not self.arenas.version(model_id):
            groups = self.arenas.chosen(self.links, self.links)
            self.arenas.plan(model_id, self._plain[model_id], groups, 1, len(self.links)).accept()
        self._tell(model_id, self.links)

    def plan(self, model_id: str, source: Any, links: Collection[int], version: int) -> Plan:
        """Check weights that are to be written once for each group of workers."""
        self._check_open()
        if not isinstance(source, (nn.Module, TensorDictBase, Mapping)):
            raise ValueError(f"weights are a torch.nn.Module, a TensorDict or a dict, not a {type(source).__name__}")
        if isinstance(source, TensorDictBase):
            source = _STRATEGY.extract_weights(source)  # a path for each dotted key, as modules have them
        registered = model_id in self._plain or self.arenas.version(model_id)
        if not self.auto_register and not registered:
            known = sorted({*self._plain, *self.arenas.known()})
            raise KeyError(
                f"{model_id!r} is not registered, only {known} are; call register_shared_weights(), or use "
                "auto_register=True"
            )
        plain = self._plain.get(model_id)
        if plain is not None:
            return self._plan_plain(model_id, plain, source, links, version)
        alive = self.alive()
        groups = self.arenas.chosen(links, alive) if alive else [ALL]
        plan = self.arenas.plan(model_id, source, groups, version, len(self.links))

        def accept() -> None:
            plan.accept()
            if model_id not in self.policy_weights:
                self.policy_weights[model_id] = self.arenas.publisher(model_id, groups[0]).weights

        return plan._replace(accept=accept)

    def _plan_plain(
        self, model_id: str, plain: TensorDictBase, source: Any, links: Collection[int], version: int
    ) -> Plan:
        """The same where the user's own shared TensorDict is written too. Without workers it is all there is."""
        extracted = _STRATEGY.extract_weights(source)
        _STRATEGY.check_weights(plain, extracted)
        alive = self.alive()
        plan = Plan([], lambda: None, lambda: None)
        if alive:
            plan = self.arenas.plan(model_id, source, self.arenas.chosen(links, alive), version, len(self.links))

        def accept() -> None:
            plan.accept()
            _STRATEGY.apply_weights(plain, extracted)

        return plan._replace(accept=accept)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this scheme was shut down, and its arenas are gone; make a new one")

    def alive(self) -> dict[int, Link]:
        """The workers whose death no error has named."""
        return {index: link for index, link in self.links.items() if not link.reported}

    def announce(self, model_id: str, links: Mapping[int, Link]) -> dict[int, list[Tag]]:
        """Tell these workers of the newest version in their arena; which answers each of them owes."""
        self._check_open()
        versions = {index: self.arenas.newest_for(model_id, index) for index in links}
        self._tell(model_id, links)
        unconfirmed = self._unconfirmed.get(model_id, set())
        owed = {}
        for index, link in links.items():
            tag = Tag(model_id, versions[index])
            owed[index] = [Tag(model_id, 0), tag] if index in unconfirmed else [tag]
            link.answers.send(_wire.small((tuple(tag), _wire.UPDATE)), tag, replaceable=True)
        unconfirmed.difference_update(links)
        return owed

    def route(self, model_id: str) -> Route | None:
        """The quick way to all workers, if all have been told where the arena is, have said that they are there, and
        are not known to be dead."""
        self._check_open()
        route = self._routes.get(model_id)
        if route is not None and route.links == self.links and not any(link.reported for link in self.links.values()):
            return route
        publisher = self.arenas.only(model_id)
        ready = self._joined.get(model_id) == self.links and not self._unconfirmed.get(model_id)
        if publisher is None or not ready or model_id in self._plain:
            return None
        if not self.links or any(link.reported for link in self.links.values()):
            return None
        route = Route(dict(self.links), publisher, self.arenas.optional(model_id))
        if route.complete:
            self._routes[model_id] = route
        return route

    def _tell(self, model_id: str, links: Mapping[int, Link]) -> None:
        joined = self._joined.setdefault(model_id, {})
        for index, link in links.items():
            if joined.get(index) is not link:
                handle = self.arenas.publisher(model_id, self.arenas.group_of(index)).handle
                tag = Tag(model_id, 0)
                message = _wire.Tagged(((model_id, handle), _wire.REGISTER), tag, index)
                link.answers.send(_wire.dumps(message), tag)
                joined[index] = link
                self._unconfirmed.setdefault(model_id, set()).add(index)

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Write the weights, and wait until every worker uses them. Raises as WeightSender.send()."""
        self.send_weights_async(model_id, weights)
        self.wait_ack()

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Write the weights and tell the workers; wait_ack() waits."""
        alive = self.alive()
        version = self.arenas.version(model_id) + 1
        plan = self.plan(model_id, weights, alive, version)
        write([plan], version, deadline_after(None, self.timeout))
        self._async = model_id, version, self.announce(model_id, alive) if alive else {}

    def wait_ack(self) -> None:
        """Wait for the answers to the last send_weights_async(); RuntimeError when there was none."""
        if self._async is None:
            raise RuntimeError("no send is pending; call send_weights_async() first")
        (model_id, version, owed), self._async = self._async, None
        links = {index: self.links[index] for index in owed}
        outcome = gather(links, owed, deadline_after(None, self.timeout))
        for index in outcome.dead:
            links[index].reported = True
        outcome.check(f"version {version} of {model_id!r}", version)

    # The worker's side.

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        """In the worker: the weights of the next version of any model, as (model_id, zero-copy TensorDict), protected
        only inside a read section; None if none came. send_ack() answers. Registrations are answered by themselves."""
        while (message := self.next_message(lambda m: m.kind in (_wire.UPDATE, _wire.REGISTER), timeout)) is not None:
            if message.kind == _wire.UPDATE:
                subscriber = self.subscriptions.needed(message.model_id)
                subscriber.refresh()
                return message.model_id, subscriber.weights
            self.subscriptions.join(message.model_id, message.content, message.worker)
            self.send_ack(_wire.REGISTERED)
        return None

    def pending(self) -> list[Any]:
        """As in MPTransport; on the sender's side those of all workers."""
        found = [] if self.pipe is None else super().pending()
        for link in self.links.values():
            found += link.take_pending()
        return found

    def check_connection(self) -> bool:
        """Can every other side still be reached, as far as is known?"""
        return super().check_connection() and not any(link.dead for link in self.links.values())

    def close(self) -> None:
        """End the arenas, or leave them. Idempotent."""
        self._closed = True
        self.arenas.close()
        self.subscriptions.close()


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
        with publisher._side.lock:
            self._version = version = publisher._publish(source, deadline, optional=optional)
        tag = Tag(self._model_id, version)
        sent = _wire.small(((self._model_id, version), _wire.UPDATE))
        late = route.exchange(sent, _wire.small(((self._model_id, version), _wire.UPDATED)), tag, deadline)
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
            self._transport.send_ack(_wire.UPDATED)
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
