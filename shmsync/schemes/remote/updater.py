"""Weight updaters: the older API of TorchRL's collectors, in which the trainer pushes weights to workers by id.

A push of RayWeightUpdater is a send of RayWeightSyncScheme to those actors that the push does not skip.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import nn

from ..strategy import WeightStrategy
from .ray import RayWeightSyncScheme, require_ray

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
        weights = self._maybe_map_weights(
            self._get_server_weights() if policy_or_weights is None else policy_or_weights
        )
        if chosen is None:
            self._sync_weights_with_worker(server_weights=weights)
        for worker in chosen or ():
            if not self._skip_update(worker):
                self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
        self._finish()
        for hook in self.post_hooks:
            hook()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> Self:
        """push_weights(). Returns the updater itself."""
        self.push_weights(policy_or_weights, worker_ids)
        return self

    def all_worker_ids(self) -> Sequence[Any] | None:
        """The ids of all workers; None: there is only one."""
        return None

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        """Give a worker the weights."""

    def _finish(self) -> None:  # noqa: B027
        """Return when the workers of this push have the weights."""

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
    left out from then on, until others are in their place in the list.
    """

    def __init__(
        self, policy_weights: Any, remote_collectors: list[Any], max_interval: int = 0, *, timeout: float | None = None
    ) -> None:
        self._ray = require_ray(self)
        self.policy_weights = policy_weights
        self.remote_collectors = remote_collectors
        self.max_interval = max(0, max_interval)
        scheme = RayWeightSyncScheme(timeout=timeout)
        scheme.init_on_sender("policy", remote_collectors=[])
        self._sender: Any = scheme.get_sender()
        # By worker: its actor, the batches since it got weights, and in a push what it gets.
        self._actors: dict[int, Any] = {}
        self._waited: dict[int, int] = {}
        self._due: dict[int, Any] = {}

    def all_worker_ids(self) -> list[int]:
        """The indices of the actors."""
        return list(range(len(self.remote_collectors)))

    def _get_server_weights(self) -> Any:
        """The server's weights, which a push puts into Ray's object store."""
        return self.policy_weights

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Weights to send; also of a reference to weights that are in the store already."""
        if type(policy_or_weights).__name__ == "ObjectRef":
            policy_or_weights = self._ray.get(policy_or_weights)
        return super()._maybe_map_weights(policy_or_weights)

    def _skip_update(self, worker_id: int) -> bool:
        actor = self.remote_collectors[worker_id]
        if self._actors.get(worker_id) is not actor:
            self._sender.register_worker(worker_id, actor)
            self._actors[worker_id], self._waited[worker_id] = actor, 0
        self._waited[worker_id] += 1
        return self._waited[worker_id] <= self.max_interval

    def _sync_weights_with_worker(self, *, worker_id: int | None = None, server_weights: Any) -> None:
        assert worker_id is not None
        self._due[worker_id] = server_weights

    def _finish(self) -> None:
        due, self._due = self._due, {}
        if due:
            self._sender.send(next(iter(due.values())), list(due))
            self._waited.update(dict.fromkeys(due, 0))
