"""The transport of the shared-memory scheme: weights in arenas, and small messages about them over pipes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from ...engine.pickling import dumps, small
from ...engine.strategy import WeightStrategy
from ...engine.subscriber import Consistency
from ...engine.timing import deadline_after
from ...errors import ClosedError
from ..publishers import ALL, Plan, Publishers, write
from ..subscriptions import Subscriptions
from . import messages
from .exchange import Link, gather
from .messages import Tag
from .route import Route
from .transport import PipeTransport

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
        self.arenas = Publishers(slots=slots, groups=groups, timeout=timeout, alias=alias)
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
            link.answers.send(small((tuple(tag), messages.UPDATE)), tag, replaceable=True)
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
                message = messages.Tagged(((model_id, handle), messages.REGISTER), tag, index)
                link.answers.send(dumps(message), tag)
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
        while (
            message := self.next_message(lambda m: m.kind in (messages.UPDATE, messages.REGISTER), timeout)
        ) is not None:
            if message.kind == messages.UPDATE:
                subscriber = self.subscriptions.needed(message.model_id)
                subscriber.refresh()
                return message.model_id, subscriber.weights
            self.subscriptions.join(message.model_id, message.content, message.worker)
            self.send_ack(messages.REGISTERED)
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
