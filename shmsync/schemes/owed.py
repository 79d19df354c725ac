"""partial=True without shared memory: which leaves each worker still has to get.

A message may be late, be replaced by a newer one, or not be meant for everybody. So beside the leaves of a send a
worker gets those of earlier ones that it was sent and has not confirmed; a new worker gets all that were ever sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from ..engine import extra_state
from ..engine.strategy import leaves_of, refuse_odd
from ..memory.manifest import tie
from ..memory.plainly import run_plainly

Leaves = dict[str, Any]  # by dotted key: private copies, and what modules keep beside their tensors


@run_plainly
def private_leaves(weights: Any) -> Leaves:
    """Copies that the trainer's next step does not change; tied leaves share one. Raises ValueError for no weights."""
    if not isinstance(weights, (TensorDictBase, Mapping)):
        kind = type(weights).__name__
        raise ValueError(f"with partial=True weights are a module, a TensorDict or a dict, not a {kind}")
    tensors, extra = leaves_of(weights)
    refuse_odd({key: each for key, each in tensors.items() if isinstance(each, torch.Tensor)})
    copies: dict[Any, torch.Tensor] = {}
    found: Leaves = {}
    for key, each in tensors.items():
        if isinstance(each, torch.Tensor):
            identity = tie(each) or key
            each = copies[identity] = copies[identity] if identity in copies else each.detach().clone()
        found[".".join(key)] = each
    return found | {".".join((*path, extra_state.STATE_DICT_KEY)): state for path, state in extra.items()}


class Owed:
    """What of one model each worker has to get. Workers are told apart by the objects that stand for them."""

    def __init__(self) -> None:
        self._whole: Leaves = {}  # the newest of each leaf that was ever sent
        self._before: Leaves = {}  # the same, before the last send
        self._due: weakref.WeakKeyDictionary[Any, Leaves] = weakref.WeakKeyDictionary()

    @property
    def whole(self) -> Leaves:
        """The newest value of each leaf that was ever sent to anybody."""
        return self._whole

    def add(self, given: Leaves, workers: Iterable[Any]) -> None:
        """These leaves are for these workers, from now on; a leaf that was one tensor with one of them changes too."""
        new = {id(each): given[name] for name, each in self._whole.items() if name in given and torch.is_tensor(each)}
        tied = {name: new[id(each)] for name, each in self._whole.items() if id(each) in new and name not in given}
        for worker in workers:
            due = self._due.get(worker)
            due = self._whole if due is None else due
            self._due[worker] = {**due, **{name: each for name, each in tied.items() if name in due}, **given}
        self._before, self._whole = self._whole, {**self._whole, **tied, **given}

    def due(self, worker: Any, given: Leaves) -> Leaves | None:
        """What a message to this worker has to hold; None: no more than what was given."""
        due = self._due[worker]
        return None if due.keys() == given.keys() else due

    def renew(self, worker: Any) -> Leaves:
        """This worker is to get everything."""
        self._due[worker] = dict(self._whole)
        return self._whole

    def settle(self, given: Leaves, done: Iterable[Any], failed: Iterable[Any]) -> None:
        """These workers have confirmed all they were sent; those have refused what was given to them.

        None stands for somebody who is no worker.
        """
        done, failed = list(done), list(failed)
        refused = {id(each) for each in given.values() if torch.is_tensor(each)}  # with their names, and those tied
        for worker in done:
            self._due[worker] = {}
        for worker in failed:
            if worker is None:
                continue  # a relay
            self._due[worker] = {
                name: each
                for name, each in self._due.get(worker, {}).items()
                if name not in given and id(each) not in refused
            }
        if failed and not done:  # nobody has these leaves, and a new worker would refuse them too
            self._whole = self._before
