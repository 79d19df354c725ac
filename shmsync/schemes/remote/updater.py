"""Weight updaters: the older API of TorchRL's collectors, in which the trainer pushes weights to workers by id.

A push of RayWeightUpdater travels as a send of RayWeightSyncScheme does: one ray.put(), then one call
`update_policy_weights_(ref)` for each actor that the push does not skip, then one wait for all.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import nn

from ...engine.deadlines import deadline_after, timeout_or_default
from ...engine.outcome import listed
from ...errors import WorkerDied
from ..strategy import WeightStrategy
from .base import Exchange, Steps
from .packed_weights import Packer
from .ray import RayRequest, RayTransport, require_ray

if TYPE_CHECKING:
    from typing_extensions import Self

_STRATEGY = WeightStrategy("tensordict")


class WeightUpdaterBase(ABC):
    """Pushes weights to workers.

    To override: `_sync_weights_with_worker`, and where the defaults do not do `_get_server_weights`,
    `_maybe_map_weights`, `_skip_update` and `all_worker_ids`.
    """

    _collector_ref: weakref.ref[Any] | None = None
    _hooks: list[Callable[[], Any]] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _introduce_to_torchrl()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make one. TorchRL may have been imported since the class was."""
        _introduce_to_torchrl()
        return super().__new__(cls)

    @classmethod
    def from_policy(cls, policy: nn.Module) -> WeightUpdaterBase | None:
        """An updater for a policy, where a kind of updater can be made of that alone; else None."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027
        """For what a kind of updater has to prepare; nothing here."""

    def register_collector(self, collector: Any) -> None:
        """The collector whose workers it updates. Held weakly. RuntimeError the second time."""
        if self._collector_ref is not None:
            raise RuntimeError("this updater has a collector already; make one updater for each collector")
        self._collector_ref = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The registered collector; None when there is none, or it is gone."""
        return None if self._collector_ref is None else self._collector_ref()

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """What is called after each push, in this order."""
        if self._hooks is None:
            self._hooks = []
        return self._hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Call this hook, without arguments, after each push that went well."""
        self.post_hooks.append(hook)

    def increment_version(self) -> None:
        """Count the collector's policy version on; nothing when it is gone."""
        if self.collector is not None:
            self.collector.increment_version()

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Push weights to workers, and call the hooks.

        Args:
            policy_or_weights: a module, a TensorDict or a dict; None: the server's.
            worker_ids: one id, or several; None: all.

        Raises TypeError for weights of another type, ValueError for an unknown worker.
        """
        self._push(policy_or_weights, worker_ids)
        for hook in self.post_hooks:
            hook()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> Self:
        """push_weights(). Returns the updater itself."""
        # A collector of TorchRL's calls an updater that it does not know as if it were a constructor, and keeps what
        # that returns. It knows all but those that were made before TorchRL was imported; these it knows from now on.
        _introduce_to_torchrl()
        self.push_weights(policy_or_weights, worker_ids)
        return self

    def _push(self, policy_or_weights: Any, worker_ids: Any) -> None:
        weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(weights)
        known = self.all_worker_ids()
        if worker_ids is None and known is None:
            self._sync_weights_with_worker(server_weights=weights)
            return
        several = isinstance(worker_ids, Sequence) and not isinstance(worker_ids, str)
        chosen = known if worker_ids is None else list(worker_ids) if several else [worker_ids]
        unknown = [worker for worker in chosen or () if known is not None and worker not in known]
        if unknown:
            raise ValueError(f"worker {unknown[0]} is not registered; the registered ones are {list(known or ())}")
        for worker in chosen or ():
            if not self._skip_update(worker):
                self._sync_weights_with_worker(worker_id=worker, server_weights=weights)

    # What kinds of updaters do differently.

    def all_worker_ids(self) -> Sequence[Any] | None:
        """The ids of all workers; None: there is only one."""
        return None

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        """Give a worker the weights."""

    def _get_server_weights(self) -> Any:
        """The weights of a push that got none."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """From what was pushed to what workers get: a module's weights as a TensorDict, weights as they are."""
        if isinstance(policy_or_weights, nn.Module):
            return _STRATEGY.extract_weights(policy_or_weights)
        if isinstance(policy_or_weights, (TensorDictBase, dict)):
            return policy_or_weights
        raise TypeError(
            f"weights to push are a torch.nn.Module, a TensorDict or a dict, not a {type(policy_or_weights).__name__}; "
            "with none given, _get_server_weights() has to give them"
        )

    def _skip_update(self, worker_id: Any) -> bool:
        """Does this worker keep what it has, this time?"""
        return False


def _introduce_to_torchrl() -> None:
    """Let TorchRL's collectors, if there are any in this process, take our updaters for what they are."""
    module = sys.modules.get("torchrl.collectors.weight_update")
    base = getattr(module, "WeightUpdaterBase", None)  # None: its import is under way
    if base is not None and not issubclass(WeightUpdaterBase, base):
        base.register(WeightUpdaterBase)


class RayWeightUpdater(WeightUpdaterBase):
    """Pushes weights to actors of Ray: one object in the store for each push, then `update_policy_weights_(ref)`.

    Args:
        policy_weights: the server's: a TensorDict, a dict or a module, read at each push that gets no others.
        remote_collectors: the actors; the list is read at each push.
        max_interval: batches that a worker may go without an update: a push skips it until more than that have passed.
        timeout: seconds for each push; math.inf waits without limit, None is 60.

    A push waits until every actor has applied it. Raises WorkerDied, AckTimeout, an actor's own exception; the dead are
    left out from then on.
    """

    def __init__(
        self, policy_weights: Any, remote_collectors: list[Any], max_interval: int = 0, *, timeout: float | None = None
    ) -> None:
        require_ray(type(self).__name__)
        self.policy_weights = policy_weights
        self.remote_collectors = remote_collectors
        self.max_interval = max(0, max_interval)
        self._timeout = timeout_or_default(timeout, 60.0)
        self._packer = Packer()
        self._pushes = 0
        self._transports: dict[int, RayTransport] = {}  # by the actor's id()
        self._waited: weakref.WeakKeyDictionary[RayTransport, int] = weakref.WeakKeyDictionary()  # batches
        self._chosen: dict[int, Any] | None = None  # in a push: what each worker gets

    def all_worker_ids(self) -> list[int]:
        """The indices of the actors."""
        return list(range(len(self.remote_collectors)))

    def _push(self, policy_or_weights: Any, worker_ids: Any) -> None:
        actors = {id(actor) for actor in self.remote_collectors}
        self._transports = {key: transport for key, transport in self._transports.items() if key in actors}
        worker_ids = int(worker_ids) if isinstance(worker_ids, Integral) else worker_ids
        self._refuse_dead(worker_ids)
        self._chosen = {}
        try:
            super()._push(policy_or_weights, worker_ids)
        finally:
            chosen, self._chosen = self._chosen, None
        transports = {worker: self._transport(worker) for worker in chosen}
        exchange = Exchange(
            self._pushes, transports, lambda worker: _update(transports[worker], chosen[worker])
        ).begin()
        exchange.finish(deadline_after(None, self._timeout))
        for worker in exchange.outcome.done:
            self._waited[transports[worker]] = 0
        exchange.outcome.check(f"push {self._pushes}", self._pushes)

    def _refuse_dead(self, worker_ids: Any) -> None:
        known = self.all_worker_ids()
        chosen = known if worker_ids is None else [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        dead: list[Any] = [worker for worker in chosen if worker in known and self._transport(worker).reported]
        if dead and (worker_ids is not None or len(dead) == len(known)):
            raise WorkerDied(
                f"{listed(dead)} died before; nothing was pushed. Put new actors into the list", missing=dead
            )

    def _get_server_weights(self) -> Any:
        """A reference to the server's weights in Ray's object store."""
        return self._maybe_map_weights(self.policy_weights)

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """A reference to the weights in Ray's object store."""
        if type(policy_or_weights).__name__ == "ObjectRef":
            return policy_or_weights
        weights = super()._maybe_map_weights(policy_or_weights)
        packed = self._packer.pack(weights, "policy", self._pushes + 1)
        self._pushes += 1
        return RayTransport().wrap(packed)

    def _skip_update(self, worker_id: int) -> bool:
        transport = self._transport(worker_id)
        if transport.reported:
            return True
        self._waited[transport] = self._waited.get(transport, 0) + 1
        return self._waited[transport] <= self.max_interval

    def _sync_weights_with_worker(self, *, worker_id: int | None = None, server_weights: Any) -> None:
        assert worker_id is not None
        if self._chosen is not None:
            self._chosen[worker_id] = server_weights
        else:  # called alone: no call waits
            transport = self._transport(worker_id)
            transport.actor.update_policy_weights_.remote(server_weights)
            self._waited[transport] = 0

    def _transport(self, worker_id: int) -> RayTransport:
        actor = self.remote_collectors[worker_id]
        known = self._transports.get(id(actor))
        if known is None:  # it keeps the actor, so no other actor gets that id
            known = self._transports[id(actor)] = RayTransport(actor)
        return known


def _update(transport: RayTransport, reference: Any) -> Steps:
    """The call of a push. By position: these actors may call their argument otherwise."""
    yield RayRequest(transport.actor.update_policy_weights_.remote(reference))
