"""The trainer's arenas of one model: workers that get the same weights share one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import util
from typing import Any, NamedTuple

from torch import nn

from ....engine.publisher import Publisher, writer_of
from ....engine.source.dtypes import Dtypes, dtypes_of
from ....engine.source.sources import EVERYTHING, collect
from ....errors import ManifestMismatch
from ....memory.arena import nested
from ....memory.leftovers import new_name
from ....memory.segment import RowId
from .. import extra_state
from .own_weights import UNCHANGED


class Group:
    """One arena for workers that have the same weights. `members`: the workers that start with it."""

    def __init__(self, publisher: Publisher, members: Collection[int] = ()) -> None:
        self.publisher, self.writer = publisher, writer_of(publisher)
        self.attached = set(members)
        self._rows: dict[int, RowId] = {}
        leaf = self.writer.arena.manifest.by_key.get(extra_state.KEY)
        self.room = None if leaf is None else leaf.nbytes  # for extra state

    def taken(self, tensors: Any, states: extra_state.States | None) -> Any:
        """What to publish here; None when the arena has no room for the extra state."""
        if tensors is UNCHANGED:  # the smallest leaf as it is published changes nothing, since the other leaves stay
            leaf = min(self.writer.arena.manifest.by_key.values(), key=lambda leaf: leaf.nbytes or math.inf)
            return nested({leaf.key: self.publisher.weights.get(leaf.key).clone()})
        if states is None:  # the state that lies there stays
            return extra_state.flat(tensors) if self.room is not None and isinstance(tensors, nn.Module) else tensors
        return None if self.room is None else extra_state.fitted(tensors, states, self.room)

    def known_of(self, tensors: Any, states: extra_state.States | None) -> tuple[Any, extra_state.States | None]:
        """What of these weights has a leaf here. All of them if none has, so that publishing them is refused."""
        manifest = self.writer.arena.manifest
        known = {
            ".".join(key): tensor
            for key, tensor in collect(tensors, EVERYTHING, manifest).items()
            if key in manifest.by_key
        }
        if states is not None:
            paths = extra_state.states_in(self.publisher.weights.get(extra_state.LEAF)) if self.room is not None else {}
            states = {path: state for path, state in states.items() if path in paths} or None
        return known or tensors, states

    def applied(self, version: int) -> list[int]:
        """The workers that have applied this version, including those that have left since."""
        workers = self.writer.applied_by(version)
        self.attached.update(workers)
        return workers

    def wait(self, version: int, workers: Collection[int], nanoseconds: int) -> bool:
        """Sleep until these workers have acked, at most `nanoseconds`. False, without sleep: none is attached."""
        if any(worker not in self._rows for worker in workers):
            self._rows = self.writer.attached_rows()
        rows = [self._rows[worker] for worker in workers if worker in self._rows]
        if rows and not self.writer.wait_rows(version, rows, nanoseconds):
            self._rows = {}  # all acked, or their rows have other owners now: look again at the next wait
        return bool(rows)


class Membership(NamedTuple):
    """A group, who belongs to it, and the groups that others have left it for."""

    group: Group
    workers: frozenset[int]
    left_for: tuple[tuple[Group, frozenset[int]], ...] = ()

    def still_used_by(self) -> tuple[tuple[Group, frozenset[int]], ...]:
        """The groups of left_for whose workers have not acked there yet, and so may still use this arena."""
        for group, _ in self.left_for:
            group.applied(group.publisher.version)
        return tuple((group, workers) for group, workers in self.left_for if not workers <= group.attached)


class Assignment(NamedTuple):
    """A version that these workers have to apply."""

    group: Group
    version: int
    workers: frozenset[int]


class Groups:
    """The arenas of one model.

    Args:
        sources: the first weights by worker; workers with the same object share an arena, on each device one.
        apart: give each worker its own arena in any case.
        options: of each Publisher: slots, timeout.
        dtype: of the first arenas; later ones cast as the arena that they are copied from.
        strict: refuse weights that the arena has no leaf for; else they are left out.
        places: by worker, the device on which its arena lies.

    Nothing is made before open(), but the arenas' names are known: workers may look for them already.
    """

    def __init__(
        self,
        sources: Mapping[int, Any],
        *,
        apart: bool,
        options: Mapping[str, Any],
        dtype: Dtypes = None,
        strict: bool = True,
        places: Mapping[int, str],
    ) -> None:
        self._options = {**options, "max_readers": max(64, 2 * len(sources))}
        self._dtype, self._strict = dtype, strict
        planned: dict[Any, tuple[str, list[int], str]] = {}  # name, workers, device
        for worker, source in sources.items():
            place = places[worker]
            key = worker if apart else (id(source), place)
            planned.setdefault(key, (new_name(), [], place))[1].append(worker)
        self._planned = list(planned.values())
        self.workers = set(sources)
        self._members: tuple[Membership, ...] = ()  # replaced as a whole: an interrupt may land anywhere
        self._groups: list[Group] = []  # every one that has an arena
        self._closing = util.Finalize(self, _close, (self._groups,), exitpriority=25)

    @property
    def names(self) -> dict[int, str]:
        """The name of the arena that each worker starts with."""
        return {worker: name for name, workers, _ in self._planned for worker in workers}

    def open(self, weights_of: Callable[[int], Any]) -> None:
        """Make the arenas, each with the weights that one of its workers has now. Idempotent.

        Raises what Publisher() raises.
        """
        if self._members:
            return
        members = []
        for name, workers, place in self._planned:
            tensors, states = extra_state.separate(weights_of(workers[0]))
            first = tensors if states is None else extra_state.together(tensors, states)
            group = self._make(first, name, place, self._dtype, workers)
            members.append(Membership(group, frozenset(workers)))
        self._members = tuple(members)

    def weights(self) -> Any:
        """The newest weights as a TensorDict; of several arenas, those of the first."""
        group = self._members[0].group
        weights = group.publisher.weights
        return weights if group.room is None else weights.exclude(extra_state.LEAF)

    def publish(
        self, wanted: Sequence[tuple[Any, set[int]]], absent: Collection[int], deadline: float
    ) -> list[Assignment]:
        """Publish each of these weights for its workers. Workers that are part of a group leave it for a new one.

        `absent`: dead workers; they block no reuse of an arena. Raises as Publisher.publish() does; then no arena and
        no group has changed.
        """
        plan: list[tuple[Group, Any, frozenset[int]]] = []
        fresh: list[Membership] = []
        try:
            for weights, workers in wanted:
                tensors, states = given = extra_state.separate(weights)
                for member in self._members:
                    chosen = member.workers & workers
                    if not chosen:
                        continue
                    if not self._strict and weights is not UNCHANGED:
                        tensors, states = member.group.known_of(*given)
                    group, source = member.group, member.group.taken(tensors, states)
                    others = member.workers.difference(chosen, absent)
                    if source is None or others or member.still_used_by():
                        # Others use this arena too, or it is too small: make another one, which starts as a copy.
                        group = self._branch(group, chosen, states)
                        fresh.append(Membership(group, chosen))
                        source = group.taken(tensors, states)
                    plan.append((group, source, chosen))
            members = self._after(fresh)
            versions = _publish([(group, source) for group, source, _ in plan], deadline)
            self._members = members
        except BaseException as error:
            self.sweep()
            if isinstance(error, ManifestMismatch) and "is not in the arena" in str(error):
                raise ManifestMismatch(
                    f"{error}\nTo leave out what the workers' model does not have, make the scheme with strict=False"
                ) from error
            raise
        return [Assignment(group, v, workers) for (group, _, workers), v in zip(plan, versions, strict=True)]

    def sweep(self) -> None:
        """End the arenas that no worker belongs to any more; one that has not moved yet keeps its weights."""
        current = {id(member.group) for member in self._members}
        for group in [group for group in self._groups if id(group) not in current]:
            group.publisher.close()
            self._groups.remove(group)

    def close(self) -> None:
        """End every arena. Idempotent. Raises WriterBusy for one that another thread writes; call it again then."""
        _close(self._groups)

    def _after(self, fresh: Sequence[Membership]) -> tuple[Membership, ...]:
        """The memberships after the fresh ones have taken their workers out of the others."""
        members = []
        for member in self._members:
            gone = tuple((new.group, new.workers) for new in fresh if new.workers & member.workers)
            rest = member.workers.difference(*(workers for _, workers in gone))
            if rest:
                members.append(Membership(member.group, rest, member.still_used_by() + gone))
        return (*members, *fresh)

    def _branch(self, group: Group, workers: frozenset[int], states: extra_state.States | None) -> Group:
        current: Any = group.publisher.weights
        if states is not None:
            current = current if group.room is None else current.exclude(extra_state.LEAF)
            current = extra_state.together(current, states, 2 * (group.room or 0))
        arena = group.writer.arena
        branch = self._make(current, new_name(), arena.place, dtypes_of(arena.manifest))
        branch.writer.forget_source()  # it would keep the arena that it was copied from; each send passes weights
        return branch

    def _make(self, weights: Any, name: str, device: str, dtype: Dtypes, members: Collection[int] = ()) -> Group:
        publisher = Publisher(weights, name=name, device=device, dtype=dtype, **self._options)
        self._groups.append(Group(publisher, members))
        return self._groups[-1]


def _publish(sources: Sequence[tuple[Group, Any]], deadline: float) -> list[int]:
    """Publish each source in its arena; all are checked before the first is written. The versions, visible now."""
    if len(sources) > 1:
        for group, source in sources:
            group.writer.check_weights(source)
    versions = [group.writer.publish(source, deadline) for group, source in sources]
    for group, _ in sources:
        if group.writer.device is not None:  # the workers are told of these versions
            with group.writer.lock:
                group.writer.ready(deadline)
    return versions


def _close(groups: list[Group]) -> None:
    with ExitStack() as stack:  # one that is busy keeps none of the others open, and is closed by the next call
        for group in groups:
            stack.callback(group.publisher.close)
    groups.clear()
