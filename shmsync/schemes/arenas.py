"""The arenas of a shared-memory scheme: for each model one Publisher, or one for each group of workers and each device.

A TensorDict that the user registers becomes the arena, where one arena serves all: its leaves are moved into it, so
that it is no second copy, and shows what is published. Leaves that cannot move, since other tensors show their memory,
are written by each accepted send.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from multiprocessing import util
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from ..engine.publisher import Publisher, writer_of
from ..engine.source.dtypes import Dtypes, dtypes_of
from ..engine.source.sources import EVERYTHING, Weights, collect
from ..memory.manifest import Key
from ..memory.torch_modes import run_plainly
from .devices import WorkerDevices
from .strategy import Fit, WeightStrategy, has_dotted_keys, leaves_of, write

ALL = 0  # the group of every worker, where no groups= were given


class ArenaOptions(NamedTuple):
    """How the arenas of a scheme are made; see SharedMemWeightSyncScheme."""

    slots: int
    timeout: float
    groups: Sequence[Sequence[int]] | None
    partial: bool
    dtype: Dtypes


class Arenas:
    """Publishers by model and group. A model's groups share version numbers, and skip what a send to others used.

    With `partial` the first weights of a model say which leaves its arenas have; later ones may lack any of them. A
    group whose arena is made later begins with what the others have.

    Args:
        options: of the arenas.
        devices: where each worker's weights lie.
        given: a Publisher of the user's own, for the first model that asks for one; None: there is none.

    Attributes:
        made: the publishers.
        registered: the users' TensorDicts, by model.
    """

    def __init__(self, options: ArenaOptions, devices: WorkerDevices, given: Publisher | None = None) -> None:
        self._options = options
        groups = None if options.groups is None else [list(group) for group in options.groups]
        if groups is not None and len({w for g in groups for w in g}) != sum(map(len, groups)):
            raise ValueError(f"each worker is in one group, but some are in several of {groups}")
        self._groups = groups
        self._given = given
        self.made: dict[str, dict[int, Publisher]] = {}
        self.registered: dict[str, TensorDictBase] = {}
        self._optional: dict[str, set[Key]] = {}  # leaves that weights may lack: buffers that are never saved
        self._outside: dict[str, dict[Key, torch.Tensor]] = {}  # leaves of the registered that did not move
        self._lay_out(devices)
        # Without a warning: a scheme of this shape has no close(), so collecting it is the normal end.
        self._owned: list[Publisher] = []
        self._finalizer = util.Finalize(self, _close_all, (self._owned,), exitpriority=25)

    def place(self, devices: WorkerDevices) -> None:
        """The workers' devices, where none were given. Raises ValueError when others were, or there are arenas."""
        if devices.unset or devices == self.devices:
            return
        self.devices.check_same(devices)
        if self.made:
            raise ValueError(
                f"device={devices} comes too late: the weights of {', '.join(self.made)} lie in their arenas already; "
                "say it when you make the scheme"
            )
        self._lay_out(devices)

    def _lay_out(self, devices: WorkerDevices) -> None:
        """Workers of one group that are on one device share an arena."""
        self.devices, places = devices, devices.distinct
        listed = None if self._groups is None else {w: number for number, g in enumerate(self._groups) for w in g}
        if listed is None and len(places) < 2:
            self._group_of: dict[int, int] | None = None
            self._device_of: dict[int, str | None] = {ALL: places[0] if places else None}
            return
        workers: Iterable[int] = range(devices.workers or 0) if listed is None else listed
        keys = {worker: (ALL if listed is None else listed[worker], devices.of(worker)) for worker in workers}
        numbers: dict[tuple[int, str | None], int] = {}
        self._group_of = {worker: numbers.setdefault(key, len(numbers)) for worker, key in keys.items()}
        self._device_of = {number: place for (_, place), number in numbers.items()}

    def group_of(self, worker: int) -> int:
        """Which group a worker belongs to. Raises ValueError when it is in none, or has no device."""
        self.devices.of(worker)
        if self._group_of is None:
            return ALL
        if worker not in self._group_of:
            raise ValueError(f"worker {worker} is in none of the groups; groups= must list every worker once")
        return self._group_of[worker]

    def groups_of(self, workers: Collection[int], everybody: Collection[int]) -> list[int]:
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

    def use_given(self, model_id: str) -> bool:
        """Is the user's own Publisher the arena of this model? It is that of the first model that asks."""
        if self._given is not None and not self.made:
            self.made[model_id] = {ALL: self._given}
        return self._given is not None and self.made.get(model_id, {}).get(ALL) is self._given

    def version(self, model_id: str) -> int:
        """The newest version of a model; 0 when it has no arena yet."""
        return max((publisher.version for publisher in self.made.get(model_id, {}).values()), default=0)

    def of_worker(self, model_id: str, worker: int) -> Publisher:
        """The model's publisher for the group of this worker. Raises ValueError when nothing was sent to it yet."""
        made = self.made.get(model_id, {})
        if (group := self.group_of(worker)) not in made:
            raise ValueError(f"no weights of {model_id!r} were sent to the group of worker {worker} yet; send() first")
        return made[group]

    def only(self, model_id: str) -> Publisher | None:
        """The model's one publisher for all workers; None: there is none yet, or there are several groups."""
        return self.made.get(model_id, {}).get(ALL) if self._group_of is None else None

    @property
    def is_split(self) -> bool:
        """Are there several groups?"""
        return self._group_of is not None

    def register(self, model_id: str, weights: Any) -> None:
        """This TensorDict of the user's own is the model's first version, and shows each later one.

        Raises RuntimeError when the model is registered, or was sent, already; ValueError for what is no TensorDict.
        """
        if model_id in self.registered or self.version(model_id):
            raise RuntimeError(f"{model_id!r} is registered already; its layout is fixed, so send() new values for it")
        if not isinstance(weights, TensorDictBase):
            raise ValueError(f"weights to register are a TensorDict, not a {type(weights).__name__}")
        self.registered[model_id] = weights

    def open(self, model_id: str, source: Weights, groups: Sequence[int], version: int, readers: int) -> None:
        """Make the arenas that these groups lack, of this source. Raises as Publisher() does, with nothing made."""
        if self.use_given(model_id):
            return
        given, source = source, _with_paths(source)
        made = self.made.setdefault(model_id, {})
        fresh: dict[int, Publisher] = {}
        known = next(iter(made.values()), None)
        try:
            for group in groups:
                if group not in made:
                    fresh[group] = self._make(source, known, self._device_of[group], version, readers)
        except BaseException:
            _close_all(list(fresh.values()))
            raise
        self._owned += fresh.values()
        made.update(fresh)
        if known is None:
            leaves = writer_of(next(iter(fresh.values()))).arena.manifest.leaves
            self._optional[model_id] = {leaf.key for leaf in leaves if not leaf.saved}
        if given is self.registered.get(model_id) and model_id not in self._outside:
            self._outside[model_id] = self._move(model_id, self.registered[model_id], next(iter(made.values())))

    def _make(
        self, source: Weights, known: Publisher | None, device: str | None, version: int, readers: int
    ) -> Publisher:
        options = self._options
        dtype = options.dtype
        if known is not None:  # all arenas of a model cast the same
            dtype = dtypes_of(writer_of(known).arena.manifest)
        elif options.partial:
            dtype = WeightStrategy(dtype=dtype, partial=True).usable_dtype(leaves_of(source)[0])
        publisher = Publisher(
            source,
            slots=options.slots,
            max_readers=max(64, 2 * readers),
            device=device,
            dtype=dtype,
            include=["*"] if options.partial else None,  # a worker's module may have other leaves besides
            timeout=options.timeout,
            first_version=version,
        )
        writer_of(publisher).forget_source()  # each send has its own
        return publisher

    def publish(
        self, model_id: str, source: Weights | None, groups: Sequence[int], version: int, readers: int, deadline: float
    ) -> None:
        """Make `source` the model's newest version for these groups: in arenas that are there, and in new ones.

        `source`: None is what a Publisher of the user's own was made of. `version`: at least this number.

        Raises as Publisher() and Publisher.publish() do, before anything is written, for weights that do not fit.
        """
        self.use_given(model_id)
        given, source = source, _with_paths(source)
        made = self.made.get(model_id, {})
        there = [made[group] for group in groups if group in made]
        if (registered := self.registered.get(model_id)) is not None and not made:
            self.open(model_id, registered, groups, version, readers)
            if given is registered:
                return
            there = [self.made[model_id][group] for group in groups]
            version += 1
        optional = None if self._options.partial else self._optional.get(model_id, ())
        if len(there) > 1:
            for publisher in there:
                writer_of(publisher).check_weights(source, optional)
        if len(there) < len(groups):
            assert source is not None, "a Publisher of the user's own has one group"
            first: Weights = source
            if made and self._options.partial:
                newest = max(made.values(), key=lambda publisher: publisher.version)
                whole, part = (collect(each, EVERYTHING) for each in (newest.weights, source))
                first = {".".join(key): tensor for key, tensor in {**whole, **part}.items()}
            self.open(model_id, first, groups, version, readers)
        for publisher in there:
            writer = writer_of(publisher)
            later = version if version > writer.next_version else None
            writer.publish(source, deadline, version=later, optional=optional)
            if writer.device is not None:  # others are told of this version
                with writer.lock:
                    writer.ready(deadline)
        if registered is not None and given is not registered:
            self.show(model_id, next(iter(self.made[model_id].values())))

    @run_plainly
    def show(self, model_id: str, publisher: Publisher) -> None:
        """Write the published version into those leaves of the registered TensorDict that lie outside the arena."""
        outside = self._outside.get(model_id)
        if outside:
            writer = writer_of(publisher)
            views = writer.arena.views(writer.current[1])
            write(Fit([(views[key], tensor) for key, tensor in outside.items()], []))

    @run_plainly
    def _move(self, model_id: str, weights: TensorDictBase, publisher: Publisher) -> dict[Key, torch.Tensor]:
        """Make the leaves of a TensorDict the arena's own memory; those that stay outside, by key."""
        manifest = writer_of(publisher).arena.manifest
        found = collect(weights, EVERYTHING, manifest, to_write=True)
        outside = {key: leaf for key, leaf in found.items() if key in manifest.by_key}
        arena = writer_of(publisher).arena
        if arena.slots > 1 or self.is_split or arena.on_device is not None:
            return outside
        views = arena.views(0, writable=True)
        for key, leaf in list(outside.items()):
            if _is_alone(leaf) and leaf.dtype == views[key].dtype:
                leaf.data = views[key]
                del outside[key]
        if outside and self._options.dtype is None:
            warnings.warn(
                f"{len(outside)} leaves of the TensorDict that is registered for {model_id!r}, such as "
                f"{'.'.join(next(iter(outside)))}, share their memory with other tensors, as a module's own parameters "
                "do, or lie elsewhere than in plain memory. They stay there, and each send copies them",
                stacklevel=5,
            )
        return outside

    def close(self) -> None:
        """End every arena that was made here. Idempotent. Raises WriterBusy for one that another thread writes."""
        _close_all(self._owned)
        self.made.clear()


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # in no torch before 2.1


def _is_alone(tensor: torch.Tensor) -> bool:
    """Does no other tensor show its memory, in plain memory of the host?"""
    if _use_count is None or type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and _use_count(storage._cdata) <= 2  # the tensor, and this object


def _with_paths(source: Any) -> Any:
    """The same weights; of a TensorDict each dotted key as a path, as modules have them."""
    if isinstance(source, TensorDictBase) and has_dotted_keys(source):
        return WeightStrategy().extract_weights(source)
    return source


def _close_all(publishers: list[Publisher]) -> None:
    while publishers:
        publishers[-1].close()
        publishers.pop()
