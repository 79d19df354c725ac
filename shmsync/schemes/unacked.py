"""partial=True without shared memory: which leaves each worker still has to get.

A message may be late, be replaced by a newer one, or not be meant for every worker. So beside the leaves of a send a
worker gets those of earlier ones that it was sent and has not answered; a new worker gets all leaves ever sent. What a
worker refuses, in time or later, is not brought to it again, and not to new workers if no other worker has it.

INV: each refusal takes at least one part out of what its worker is due: those that have the leaves which the refusal
     names. If it names none of the message, every leaf of the message is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase

from ..engine.source import extra_state
from ..engine.source.strategy import leaves_of, refuse_odd
from ..engine.source.tied import tied_along
from ..memory.manifest import tie
from ..memory.torch_modes import run_plainly

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


@dataclass(eq=False)
class SentPart:
    """What one send gave, and what became of it."""

    given: Leaves
    leaves: Leaves  # those, and the leaves that are one tensor with one of them
    brought: weakref.WeakKeyDictionary[Any, Leaves]  # every leaf that the message to each worker has to hold
    unanswered: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    refusers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    refused: bool = False
    confirmed: bool = False
    closed: bool = False  # no part of a message any more, but what several of them gave

    @property
    def counts(self) -> bool:
        """Is it for new workers too? Not if no worker has it and one has refused it."""
        return self.confirmed or not self.refused

    def is_in(self, brought: Leaves, names: Collection[str] | None = None) -> bool:
        """Has a message that brought these leaves one of this part's, of these names if any are given?"""
        return any(brought.get(n, self) is v for n, v in self.leaves.items() if names is None or n in names)

    def holds(self, name: str, value: Any) -> bool:
        """Is this leaf, or one that is the same tensor, a part of it?"""
        return self.leaves.get(name, self) is value or (
            torch.is_tensor(value) and any(each is value for each in self.leaves.values())
        )


class Unacked:
    """What of one model each worker has to get. Workers are distinguished by the objects that represent them."""

    def __init__(self) -> None:
        self._base: Leaves = {}  # the newest of each leaf in the parts that were settled for good
        # The last one, and those before it that a worker may still answer; oldest first.
        self._parts: list[SentPart] = []
        self._due: weakref.WeakKeyDictionary[Any, Leaves] = weakref.WeakKeyDictionary()

    @property
    def whole(self) -> Leaves:
        """The newest value of each leaf that was ever sent to anybody."""
        found = dict(self._base)
        for part in self._parts:
            if part.counts:
                found.update(part.leaves)
        return found

    def add(self, given: Leaves, workers: Iterable[Any]) -> None:
        """These leaves are for these workers, from now on; a leaf that was one tensor with one of them changes too."""
        whole = self.whole
        part = SentPart(given, {**tied_along(whole, given), **given}, weakref.WeakKeyDictionary())
        for worker in workers:
            due = self._due.get(worker, whole)
            self._due[worker] = {**due, **part.leaves}  # its own model may have two tensors where the trainer has one
            part.brought[worker] = self._due[worker]
        self._parts.append(part)
        self._fold()

    def due(self, worker: Any, given: Leaves) -> Leaves | None:
        """What a message to this worker has to hold; None: no more than what was given."""
        due = self._due[worker]
        return None if due.keys() == given.keys() else due

    def renew(self, worker: Any) -> Leaves:
        """This worker is to get everything."""
        whole = self._due[worker] = self.whole
        for part in self._parts[-1:]:
            part.brought[worker] = whole
        return whole

    def expect(self, given: Leaves, worker: Any) -> None:
        """This worker will answer the message that brings these leaves, perhaps after its send is over."""
        part = self._part(given)
        if part is not None:
            part.unanswered.add(worker)

    def settle(
        self, given: Leaves, done: Collection[Any], refusals: Mapping[Any, Collection[str]], never: Iterable[Any] = ()
    ) -> None:
        """Note the workers that have confirmed the message with these leaves, have refused it, or will never answer it.

        The same for answers that came in time and for those that came later. None is a peer that is not a worker.
        `refusals` says which leaves speak against the message, as far as they are known.
        """
        part = self._part(given)
        if part is None:
            return
        for worker in (*done, *refusals, *never):
            if worker is not None:  # else a relay
                part.unanswered.discard(worker)
        for worker in done:
            self._confirm(part, worker)
        for worker, names in refusals.items():
            if worker is None:
                part.refused = True
            else:
                self._refuse(part, worker, frozenset(names))
        self._fold()

    def _part(self, given: Leaves) -> SentPart | None:
        return next((part for part in reversed(self._parts) if part.given is given), None)

    def _confirm(self, part: SentPart, worker: Any) -> None:
        had = part.brought.get(worker, {})
        for each in self._parts:
            if each.is_in(had):
                each.confirmed = True
        due = self._due.get(worker, {})
        self._due[worker] = {name: value for name, value in due.items() if had.get(name, part) is not value}

    def _refuse(self, part: SentPart, worker: Any, names: Collection[str]) -> None:
        brought, due = part.brought.get(worker, {}), self._due.get(worker, {})
        parts = self._parts[: self._parts.index(part) + 1]
        blamed = [each for each in parts if each.is_in(brought, names)]
        gone = blamed or [each for each in parts if each.is_in(brought)]
        for each in gone:
            each.refused = True
            each.refusers.add(worker)
        self._due[worker] = {n: v for n, v in due.items() if not any(each.holds(n, v) for each in gone)}

    def _fold(self) -> None:
        """Put the parts together whose answers are all there; the last one may be brought again."""
        folded: list[SentPart] = []
        for position, part in enumerate(self._parts):
            newer = self._parts[position + 1 :]
            # A newer message that a refusing worker has not answered may still contain this part.
            if (
                not newer
                or part.unanswered
                or any(worker in each.unanswered for each in newer for worker in part.refusers)
            ):
                folded.append(part)
            elif not part.counts:
                continue
            elif not folded:
                self._base.update(part.leaves)
            elif folded[-1].closed:
                folded[-1].leaves.update(part.leaves)
            else:
                folded.append(SentPart({}, dict(part.leaves), weakref.WeakKeyDictionary(), confirmed=True, closed=True))
        self._parts = folded
