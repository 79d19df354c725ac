"""The publishers of a scheme: one for each model and group of workers, and all of their arenas as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from multiprocessing import util
from typing import Any, NamedTuple

from torch import nn

from ...engine.publish_all import Publication, publish_all
from ...engine.publisher import Publisher, writer_of
from ...engine.source.dtypes import Dtypes
from ...engine.source.sources import EVERYTHING, Weights, collect, not_saved
from ...errors import ManifestMismatch
from ...memory.manifest import Key
from .. import extra_state
from ..cast_before_send import dtypes_of, matching_dtypes
from ..sent_leaves import tied_along
from ..strategy import WeightStrategy
from .worker_devices import DeviceChoice, WorkerDevices, devices_for

ALL = 0  # the group of every worker, where no groups= were given


class Plan(NamedTuple):
    """New weights of one model, checked and not yet visible to anybody."""

    publications: list[Publication]  # what remains to be written into arenas
    accept: Callable[[], None]
    discard: Callable[[], None]


def write(plan: Plan, version: int, deadline: float) -> None:
    """Make the plan real: publish in its arenas, then accept it; discard it when that fails."""
    try:
        publish_all(plan.publications, version, deadline)
    except BaseException:
        plan.discard()
        raise
    plan.accept()


class ArenaOptions(NamedTuple):
    """How the arenas of a scheme are made; see SharedMemWeightSyncScheme."""

    slots: int
    timeout: float
    groups: Sequence[Sequence[int]] | None = None
    partial: bool = False
    dtype: Dtypes = None
    device: DeviceChoice | WorkerDevices = None


class Publishers:
    """Publishers by model and group. A model's groups share version numbers, and skip what a send to others used.

    With `partial` the first weights of a model say which leaves its arenas have; later ones may lack any of them. A
    group whose arena is made later begins with what the others have.
    """

    def __init__(self, options: ArenaOptions) -> None:
        self.options = options
        self._strategy = WeightStrategy()
        self._groups = None if options.groups is None else [list(group) for group in options.groups]
        if self._groups is not None and len({w for g in self._groups for w in g}) != sum(map(len, self._groups)):
            raise ValueError(f"each worker is in one group, but some are in several of {self._groups}")
        self._group_of: dict[int, int] | None = None
        self._device_of: dict[int, str | None] = {}  # by group
        self._take(devices_for(options.device))
        self.made: dict[str, dict[int, Publisher]] = {}  # by model and group
        self._optional: dict[str, set[Key]] = {}  # buffers of the model that no state_dict() has
        # close() does not warn: a scheme of this shape has no close(), so collecting it is the normal end.
        self._finalizer = util.Finalize(self, _close_all, (self.made,), exitpriority=25)

    def place(self, devices: WorkerDevices) -> None:
        """The workers' devices, where none were given. Raises ValueError when others were, or there are arenas."""
        if devices.unset or devices == self.devices:
            return
        self.devices.check_same(devices)
        if self.made:
            raise ValueError(
                f"device={devices} comes too late: the weights of {', '.join(self.made)} lie in their arenas "
                "already; say it when you make the scheme"
            )
        self._take(devices)

    def _take(self, devices: WorkerDevices) -> None:
        """Workers of one group that are on one device share an arena."""
        places = devices.distinct
        listed = None if self._groups is None else {w: number for number, g in enumerate(self._groups) for w in g}
        if listed is None and len(places) < 2:
            self._group_of, self._device_of = None, {ALL: places[0] if places else None}
        else:
            workers: Iterable[int] = range(devices.workers or 0) if listed is None else listed
            keys = {worker: (ALL if listed is None else listed[worker], devices.of(worker)) for worker in workers}
            numbers: dict[tuple[int, str | None], int] = {}
            self._group_of = {worker: numbers.setdefault(key, len(numbers)) for worker, key in keys.items()}
            self._device_of = {number: place for (_, place), number in numbers.items()}
        self.devices = devices

    def group_of(self, worker: int) -> int:
        """Which group a worker belongs to. Raises ValueError when it is in none, or has no device."""
        self.devices.of(worker)
        if self._group_of is None:
            return ALL
        if worker not in self._group_of:
            raise ValueError(f"worker {worker} is in none of the groups; groups= must list every worker once")
        return self._group_of[worker]

    def chosen(self, workers: Collection[int], everybody: Collection[int]) -> list[int]:
        """The groups of these workers, which must be whole groups of all workers."""
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

    def version(self, model_id: str) -> int:
        """The newest version of a model; 0 when it has no arena yet."""
        return max((p.version for p in self.made.get(model_id, {}).values()), default=0)

    def publisher(self, model_id: str, group: int) -> Publisher:
        """The publisher of a model for a group."""
        return self.made[model_id][group]

    def known_publisher(self, model_id: str, groups: Sequence[int]) -> Publisher | None:
        """The model's publisher for the first of these groups that has one."""
        made = self.made.get(model_id, {})
        return next((made[group] for group in groups if group in made), None)

    def of_worker(self, model_id: str, worker: int) -> Publisher:
        """The model's publisher for the group of this worker. Raises ValueError when nothing was sent to it yet."""
        publisher = self.known_publisher(model_id, [self.group_of(worker)])
        if publisher is None:
            raise ValueError(f"no weights of {model_id!r} were sent to the group of worker {worker} yet; send() first")
        return publisher

    def only(self, model_id: str) -> Publisher | None:
        """The model's publisher if it has one for all workers."""
        return None if self._group_of is not None else self.made.get(model_id, {}).get(ALL)

    def optional(self, model_id: str) -> set[Key]:
        """Leaves that weights of the model may lack: its buffers that are never saved."""
        return self._optional.get(model_id, set())

    def plan(self, model_id: str, source: Weights, groups: Sequence[int], version: int, readers: int) -> Plan:
        """Make `source` that version for these groups: arenas where there are none yet, a publish where there are.

        Raises ManifestMismatch for extra state, and what Publisher() raises; weights that lack a leaf are refused.
        """
        _refuse_extra_state(model_id, source)
        if not self.options.partial and model_id not in self._optional and isinstance(source, nn.Module):
            self._optional[model_id] = not_saved(source)
        made = self.made.setdefault(model_id, {})
        first = source
        if self.options.partial and made:
            source = self._strategy.extract_weights(source) if isinstance(source, nn.Module) else source
            known = max(made.values(), key=lambda publisher: publisher.version)
            writer_of(known).check_weights(source)
            whole, given = _named(known.weights), _named(source)
            first = {**whole, **tied_along(whole, given), **given}
        fresh: dict[int, Publisher] = {}

        def discard() -> None:
            for publisher in fresh.values():
                publisher.close()

        try:
            for group in groups:
                if group not in made:
                    fresh[group] = self._make(
                        first, readers, version, self._device_of[group], next(iter(made.values()), None)
                    )
        except BaseException:
            discard()
            raise
        optional = None if self.options.partial else self.optional(model_id)
        old = [Publication(writer_of(made[group]), source, optional) for group in groups if group in made]
        return Plan(old, lambda: made.update(fresh), discard)

    def _make(
        self, source: Weights, readers: int, version: int, device: str | None, known: Publisher | None
    ) -> Publisher:
        publisher = Publisher(
            source,
            slots=self.options.slots,
            max_readers=max(64, 2 * readers),
            device=device,
            dtype=self._dtype_for(source, known),
            include=["*"] if self.options.partial else None,  # a worker's module may have other leaves besides
            timeout=self.options.timeout,
        )
        try:
            if not isinstance(source, nn.Module):
                writer_of(publisher).forget_source()  # a relay's weights are a buffer that comes and goes
            if version > 1:  # the model's other groups have come that far
                publish_all([Publication(writer_of(publisher), source)], version, math.inf)  # no worker reads it yet
        except BaseException:
            publisher.close()
            raise
        return publisher

    def _dtype_for(self, source: Weights, known: Publisher | None) -> Dtypes:
        if known is None and not self.options.partial:
            return self.options.dtype
        # All arenas of a model cast the same.
        dtype = self.options.dtype if known is None else dtypes_of(writer_of(known).arena.manifest)
        return matching_dtypes(collect(source, EVERYTHING).tensors, dtype)

    def close(self) -> None:
        """End every arena. Idempotent. Raises WriterBusy for one that another thread writes; call it again then."""
        _close_all(self.made)


def _refuse_extra_state(model_id: str, source: Weights) -> None:
    _, states = extra_state.separate(source)
    if states:
        whose = ", ".join(repr(path) if path else "the model itself" for path in states)
        raise ManifestMismatch(
            f"{model_id!r} has extra state (get_extra_state() of {whose}), which shared memory does not carry; nothing "
            "was sent. Keep it in buffers, or use MultiProcessWeightSyncScheme"
        )


def _named(weights: Weights) -> dict[str, Any]:
    return {".".join(key): tensor for key, tensor in collect(weights, EVERYTHING).tensors.items()}


def _close_all(publishers: dict[str, dict[int, Publisher]]) -> None:
    with ExitStack() as stack:  # one that is busy keeps none of the others open, and is closed by the next call
        for of_model in publishers.values():
            for publisher in of_model.values():
                stack.callback(publisher.close)
    publishers.clear()
