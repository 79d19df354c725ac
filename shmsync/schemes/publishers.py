"""The publishers of a scheme: one for each model and group of workers, and all of their arenas as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from multiprocessing import util
from typing import NamedTuple

from torch import nn

from ..engine.publisher import Publication, Publisher, publish_all
from ..engine.sources import Weights, not_saved
from ..memory.manifest import Key

ALL = 0  # the group of every worker, where no groups= were given


class Plan(NamedTuple):
    """New weights of one model, checked and not yet visible to anybody."""

    publications: list[Publication]  # what remains to be written into arenas
    accept: Callable[[], None]
    discard: Callable[[], None]


def write(plans: Sequence[Plan], version: int, deadline: float) -> None:
    """Make all of the plans real, or none."""
    publications = [publication for plan in plans for publication in plan.publications]
    try:
        publish_all(publications, version, deadline)
    except BaseException:
        for plan in plans:
            plan.discard()
        raise
    for plan in plans:
        plan.accept()


class Publishers:
    """Publishers by model and group. A model's groups share version numbers, and skip what a send to others used."""

    def __init__(self, *, slots: int, groups: Sequence[Sequence[int]] | None, timeout: float, alias: bool) -> None:
        self._slots = slots
        self._timeout = timeout
        self._alias = alias
        self._group_of: dict[int, int] | None = None
        if groups is not None:
            self._group_of = {worker: number for number, group in enumerate(groups) for worker in group}
            if len(self._group_of) != sum(len(group) for group in groups):
                raise ValueError(f"each worker is in one group, but some are in several of {[list(g) for g in groups]}")
        self._publishers: dict[str, dict[int, Publisher]] = {}
        self._optional: dict[str, set[Key]] = {}  # buffers of the model that no state_dict() has
        # close() warns nobody: a scheme of this shape has no close(), so collecting it is the normal end.
        self._finalizer = util.Finalize(self, _close_all, (self._publishers,), exitpriority=25)

    def group_of(self, worker: int) -> int:
        """Which group a worker belongs to. Raises ValueError when it is in none."""
        if self._group_of is None:
            return ALL
        if worker not in self._group_of:
            raise ValueError(f"worker {worker} is in none of the groups; groups= must list every worker once")
        return self._group_of[worker]

    def chosen(self, workers: Collection[int], everybody: Collection[int]) -> list[int]:
        """The groups of these workers, who must be whole groups among everybody."""
        if self._group_of is None and len(workers) == len(everybody):
            return [ALL]
        members: dict[int, set[int]] = {}
        for worker in everybody:
            members.setdefault(self.group_of(worker), set()).add(worker)
        wanted = set(workers)
        for group in members.values():
            if wanted & group and not group <= wanted:
                split = [sorted(group & wanted), sorted(group - wanted)]
                raise ValueError(
                    f"workers {sorted(group)} share one arena, so a send cannot reach {split[0]} alone; split them "
                    f"with groups={split}, or send to all of them"
                )
        return sorted(number for number, group in members.items() if wanted & group)

    def known(self) -> list[str]:
        """The models that have an arena."""
        return list(self._publishers)

    def version(self, model_id: str) -> int:
        """The newest version of a model; 0 when it has no arena yet."""
        return max((p.version for p in self._publishers.get(model_id, {}).values()), default=0)

    def publisher(self, model_id: str, group: int) -> Publisher:
        """The publisher of a model for a group."""
        return self._publishers[model_id][group]

    def newest_for(self, model_id: str, worker: int) -> int:
        """The newest version that this worker's group has. Raises ValueError when nothing was sent to it yet."""
        publisher = self._publishers.get(model_id, {}).get(self.group_of(worker))
        if publisher is None:
            raise ValueError(f"no weights of {model_id!r} were sent to the group of worker {worker} yet; send() first")
        return publisher.version

    def only(self, model_id: str) -> Publisher | None:
        """The model's publisher if it has one for all workers."""
        return None if self._group_of is not None else self._publishers.get(model_id, {}).get(ALL)

    def optional(self, model_id: str) -> set[Key]:
        """Leaves that weights of the model may lack: its buffers that are never saved."""
        return self._optional.get(model_id, set())

    def applied(self, model_id: str, worker: int) -> bool:
        """Has this worker used the newest version, whether it still runs or not?"""
        publisher = self._publishers.get(model_id, {}).get(self.group_of(worker))
        return publisher is not None and worker in publisher.applied_by(publisher.version)

    def plan(self, model_id: str, source: Weights, groups: Sequence[int], version: int, readers: int) -> Plan:
        """Make `source` that version for these groups: arenas where there are none yet, a publish where there are.

        Raises what Publisher() raises; publishing refuses weights that lack a leaf.
        """
        if model_id not in self._optional and isinstance(source, nn.Module):
            self._optional[model_id] = not_saved(source)
        made = self._publishers.setdefault(model_id, {})
        fresh: dict[int, Publisher] = {}

        def discard() -> None:
            for publisher in fresh.values():
                publisher.close()

        try:
            for group in groups:
                if group not in made:
                    fresh[group] = self._make(source, readers, version)
        except BaseException:
            discard()
            raise
        old = [Publication(made[group], source, self.optional(model_id)) for group in groups if group in made]
        return Plan(old, lambda: made.update(fresh), discard)

    def _make(self, source: Weights, readers: int, version: int) -> Publisher:
        if self._alias and not isinstance(source, nn.Module):
            raise ValueError(
                f"alias=True makes a module's own parameters the shared memory, but the first weights are a "
                f"{type(source).__name__}; send the module itself"
            )
        publisher = Publisher(
            source,
            slots=self._slots,
            max_readers=max(64, 2 * readers),
            device=None if self._alias else "cpu",  # a trainer on a GPU sends too
            timeout=self._timeout,
        )
        try:
            if self._alias:
                publisher.adopt(source)  # type: ignore[arg-type]
            if not isinstance(source, nn.Module):
                publisher.forget_source()  # a relay's weights are a buffer that comes and goes
            if version > 1:  # the model's other groups have come that far
                publish_all([Publication(publisher, source)], version, math.inf)  # nobody reads it yet
        except BaseException:
            publisher.close()
            raise
        return publisher

    def close(self) -> None:
        """End every arena. Idempotent."""
        self._finalizer()


def _close_all(publishers: dict[str, dict[int, Publisher]]) -> None:
    for of_model in publishers.values():
        for publisher in of_model.values():
            publisher.close()
    publishers.clear()
