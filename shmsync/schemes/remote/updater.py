"""Weight updaters: the older API of TorchRL's collectors, in which the trainer pushes weights to workers by id.

A push of RayWeightUpdater travels as a send of RayWeightSyncScheme does: one ray.put(), then one call
`update_policy_weights_(ref)` for each actor that the push does not skip, then one wait for all.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import nn

from ...engine.deadlines import deadline_after
from ...engine.outcome import listed
from ...errors import WorkerDied
from ..strategy import WeightStrategy
from .base import Exchange
from .packing import Packer
from .ray import RayTransport

if TYPE_CHECKING:
    from typing_extensions import Self


class WeightUpdaterBase(ABC):
    """Pushes weights to workers.

    To override: `_sync_weights_with_worker`, and where the defaults do not do `_get_server_weights`,
    `_maybe_map_weights`, `_skip_update` and `all_worker_ids`.
    """

    _collector_ref: weakref.ref[Any] | None = None
    post_hooks: list[Callable[[], Any]]  # what is called after each push, in this order

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make one, which TorchRL's collectors, if there are any in this process, take for what it is."""
        module = sys.modules.get("torchrl.collectors.weight_update")
        base = getattr(module, "WeightUpdaterBase", None)  # None: its import is under way
        if base is not None and not issubclass(WeightUpdaterBase, base):
            base.register(WeightUpdaterBase)
        made = super().__new__(cls)
        made.post_hooks = []
        return made

    def register_collector(self, collector: Any) -> None:
        """The collector whose workers it updates. Held weakly. RuntimeError the second time."""
        if self._collector_ref is not None:
            raise RuntimeError("this updater has a collector already; make one updater for each collector")
        self._collector_ref = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The registered collector; None when there is none, or it is gone."""
        return None if self._collector_ref is None else self._collector_ref()

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
        several = isinstance(worker_ids, Sequence) and not isinstance(worker_ids, str)
        known = self.all_worker_ids()
        chosen = known if worker_ids is None else worker_ids if several else [worker_ids]
        unknown = [worker for worker in chosen or () if known is not None and worker not in known]
        if unknown:
            raise ValueError(f"worker {unknown[0]} is not registered; the registered ones are {list(known or ())}")
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(given)
        if chosen is None:
            self._sync_weights_with_worker(server_weights=weights)
        for worker in chosen or ():
            if not self._skip_update(worker):
                self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
        self._wait_for(chosen or ())
        for hook in self.post_hooks:
            hook()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """push_weights()."""
        self.push_weights(policy_or_weights, worker_ids)

    def _wait_for(self, chosen: Sequence[Any]) -> None:  # noqa: B027
        """Return when the workers of this push have the weights."""

    @classmethod
    def from_policy(cls, policy: nn.Module) -> WeightUpdaterBase | None:
        """An updater for a policy, where a kind of updater can be made of that alone; else None."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027
        """For what a kind of updater has to prepare; nothing here."""

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
            return WeightStrategy().extract_weights(policy_or_weights)
        if isinstance(policy_or_weights, (TensorDictBase, dict)):
            return policy_or_weights
        raise TypeError(
            f"weights to push are a torch.nn.Module, a TensorDict or a dict, not a {type(policy_or_weights).__name__}; "
            "with none given, _get_server_weights() has to give them"
        )

    def _skip_update(self, worker_id: Any) -> bool:
        """Does this worker keep what it has, this time?"""
        return False


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
        self.policy_weights = policy_weights
        self.remote_collectors = remote_collectors
        self.max_interval = max(0, max_interval)
        self._store = RayTransport(timeout=timeout)  # puts weights there; it has no actor
        self._packer = Packer()
        self._pushes = 0
        self._transports: dict[int, RayTransport] = {}  # by worker
        self._waited: dict[int, int] = {}  # batches, by worker, since it was given weights
        self._begun: dict[int, Any] = {}  # in a push: what each worker gets

    def all_worker_ids(self) -> list[int]:
        """The indices of the actors."""
        return list(range(len(self.remote_collectors)))

    def _get_server_weights(self) -> Any:
        """A reference to the server's weights in Ray's object store."""
        return self._maybe_map_weights(self.policy_weights)

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """A reference to the weights in Ray's object store."""
        if type(policy_or_weights).__name__ == "ObjectRef":
            return policy_or_weights
        weights = super()._maybe_map_weights(policy_or_weights)
        self._pushes += 1
        return self._store.wrap(self._packer.pack(weights, "policy", self._pushes))

    def _skip_update(self, worker_id: int) -> bool:
        self._waited[worker_id] = self._waited.get(worker_id, 0) + 1
        return self._transport(worker_id).reported or self._waited[worker_id] <= self.max_interval

    def _sync_weights_with_worker(self, *, worker_id: int | None = None, server_weights: Any) -> None:
        assert worker_id is not None
        self._waited[worker_id] = 0
        self._begun[worker_id] = server_weights

    def _wait_for(self, chosen: Sequence[int]) -> None:
        begun, self._begun = self._begun, {}
        dead = [worker for worker in chosen if self._transport(worker).reported]
        if dead and len(dead) == len(chosen):
            raise WorkerDied(
                f"{listed(dead)} died before; nothing was pushed. Put new actors into the list", missing=dead
            )
        transports = {worker: self._transport(worker) for worker in begun}
        exchange = Exchange(self._pushes, transports, begun)
        exchange.finish(deadline_after(None, self._store.timeout), f"push {self._pushes}")

    def _transport(self, worker_id: int) -> RayTransport:
        known, actor = self._transports.get(worker_id), self.remote_collectors[worker_id]
        if known is None or known.actor is not actor:
            known = self._transports[worker_id] = RayTransport(actor)
        return known
