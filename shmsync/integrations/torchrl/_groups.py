"""The trainer's arenas of one model: workers that get the same weights share one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from multiprocessing import util
from typing import Any, NamedTuple

from ..._joint import Source, publish_jointly
from ..._rows import RowId, claimed
from ..._segment import new_name
from ...publisher import Publisher
from . import _extra


class Group:
    """One arena, and the workers that use it."""

    def __init__(self, publisher: Publisher, workers: Collection[int], *, told: bool) -> None:
        self.publisher = publisher
        self.workers = set(workers)
        self._arrived = set(workers) if told else set()
        self._rows: dict[int, RowId] = {}
        leaf = publisher._arena.manifest.by_key.get(_extra.KEY)
        self.room = None if leaf is None else leaf.nbytes  # for extra state

    def taken(self, tensors: Any, states: _extra.States | None) -> Any:
        """What to publish here; None when the extra state does not fit, or has no place."""
        if states is None:
            return tensors
        return None if self.room is None else _extra.fitted(tensors, states, self.room)

    @property
    def strangers(self) -> set[int]:
        """Its workers that have to be told to move here, as long as none of their acks was seen here."""
        return self.workers - self._arrived

    def applied(self, version: int) -> list[int]:
        """The workers that have this version, those that have left since included."""
        workers: list[int] = self.publisher._arena.control.workers_at(version)
        self._arrived.update(workers)
        return workers

    def wait(self, version: int, workers: Collection[int], nanoseconds: int) -> bool:
        """Sleep until these workers have the version, at most so long. False: at once, since none is attached."""
        if any(worker not in self._rows for worker in workers):
            self._rows = {row.worker: row.id for row in claimed(self.publisher._arena.control)}
        rows = [self._rows[worker] for worker in workers if worker in self._rows]
        if rows and not self.publisher._side.writer.wait_acks(version, rows, nanoseconds):
            self._rows = {}  # they have it, or rows have other owners now: look again if it goes on
        return bool(rows)


class Posted(NamedTuple):
    """A version that these workers have to apply."""

    group: Group
    version: int
    workers: set[int]


class Groups:
    """The arenas of one model.

    Args:
        sources: the first weights by worker; workers with the same object share an arena.
        apart: give each worker its own all the same.
        slots, timeout: of each Publisher.
        alias: the one source is a module whose parameters become the shared memory (Publisher.adopt).

    Nothing is made before open(), but the arenas' names are known: workers may look for them already.
    """

    def __init__(
        self, sources: Mapping[int, Any], *, apart: bool, slots: int, timeout: float, alias: bool = False
    ) -> None:
        self._slots, self._timeout, self._alias = slots, timeout, alias
        self._readers = max(64, 2 * len(sources))
        self._planned: list[tuple[str, Any, list[int]]] = []  # name, source, workers
        by_source: dict[int, tuple[str, Any, list[int]]] = {}
        for worker, source in sources.items():
            key = worker if apart else id(source)
            if key not in by_source:
                by_source[key] = (new_name(), source, [])
                self._planned.append(by_source[key])
            by_source[key][2].append(worker)
        self._groups: list[Group] = []
        self._closing = util.Finalize(self, _close, (self._groups,), exitpriority=25)

    @property
    def names(self) -> dict[int, str]:
        """The name of the arena that each worker starts with."""
        return {worker: name for name, _, workers in self._planned for worker in workers}

    @property
    def workers(self) -> set[int]:
        """Every worker."""
        return {worker for _, _, workers in self._planned for worker in workers}

    def open(self) -> None:
        """Make the arenas, with the values that the sources have now. Raises what Publisher() raises."""
        for name, source, workers in self._planned:
            tensors, states = _extra.separate(source)
            if self._alias and states:
                raise ValueError(
                    "alias=True cannot share what get_extra_state() returns, which is no tensor; make the scheme "
                    "without alias="
                )
            publisher = self._make(tensors if states is None else _extra.together(tensors, states), name)
            self._groups.append(Group(publisher, workers, told=True))
            if self._alias:
                publisher.adopt(source)

    def weights(self, worker: int | None = None) -> Any:
        """The newest weights, of one worker, as a TensorDict."""
        group = next(group for group in self._groups if worker is None or worker in group.workers)
        weights = group.publisher.weights
        return weights if group.room is None else weights.exclude(_extra.LEAF)

    def publish(self, wanted: Sequence[tuple[Any, set[int]]], deadline: float) -> list[Posted]:
        """Publish weights for sets of workers, each for its own; a set that is part of a group leaves that group.

        Raises as Publisher.publish() does; then no arena has changed, and no group either.
        """
        plan: list[tuple[Group, Any]] = []
        fresh: list[tuple[Group, set[int]]] = []  # with the workers that have to move there
        try:
            for weights, workers in wanted:
                tensors, states = _extra.separate(weights)
                for group in self._groups:
                    chosen = workers & group.workers
                    if not chosen:
                        continue
                    source = group.taken(tensors, states)
                    if source is None or chosen != group.workers:
                        # Not the group's own any more, or larger: an arena of its own, which starts as a copy.
                        group = self._branch(group, chosen, states)
                        fresh.append((group, chosen))
                        source = group.taken(tensors, states)
                    plan.append((group, source))
            versions = self._publish(plan, deadline)
        except BaseException:
            for group, _ in fresh:
                group.publisher.close()
            raise
        for _, movers in fresh:
            for group in self._groups:
                group.workers -= movers
        self._groups += [group for group, _ in fresh]
        return [Posted(group, version, set(group.workers)) for (group, _), version in zip(plan, versions, strict=True)]

    def sweep(self) -> None:
        """End the arenas that nobody is meant to use any more; a worker that has not moved yet keeps what it has."""
        for group in [group for group in self._groups if not group.workers]:
            group.publisher.close()
            self._groups.remove(group)

    def close(self) -> None:
        """End every arena. Idempotent."""
        self._closing()

    def _publish(self, plan: Sequence[tuple[Group, Any]], deadline: float) -> list[int]:
        if len(plan) == 1:
            publisher, source = plan[0][0].publisher, plan[0][1]
            with publisher._side.lock:
                return [publisher._publish(source, deadline)]
        publish_jointly([Source(group.publisher, source) for group, source in plan], None, deadline)
        return [group.publisher.version for group, _ in plan]

    def _branch(self, group: Group, workers: set[int], states: _extra.States | None) -> Group:
        if self._alias:
            raise ValueError(
                f"alias=True is one storage for all workers, so workers {sorted(workers)} alone cannot get weights of "
                "their own; send to all workers, or make the scheme without alias="
            )
        current: Any = group.publisher.weights
        if states is not None:
            current = _extra.together(self.weights(next(iter(workers))), states, 2 * (group.room or 0))
        return Group(self._make(current, new_name()), workers, told=False)

    def _make(self, weights: Any, name: str) -> Publisher:
        return Publisher(
            weights, name=name, slots=self._slots, max_readers=self._readers, device="cpu", timeout=self._timeout
        )


def _close(groups: list[Group]) -> None:
    for group in groups:
        group.publisher.close()
    groups.clear()
