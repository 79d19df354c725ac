"""The arenas of a shared-memory scheme: for each model one Publisher, or one for each group of workers.

A TensorDict that the user registers becomes the arena, where one arena serves all: its leaves are moved into it, so
that it is no second copy, and shows what is published. Leaves that cannot move, since other tensors show their memory,
are written by each accepted send.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Sequence
from multiprocessing import util
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from ..engine.publisher import Publisher, writer_of
from ..engine.source.dtypes import Dtypes
from ..engine.source.manifest_check import shown_by_others
from ..engine.source.sources import Weights, collect
from ..engine.write.writer import Writer
from ..errors import ManifestMismatch
from ..memory.manifest import Key
from ..memory.torch_modes import run_plainly
from .strategy import WeightStrategy, has_dotted_keys, leaves_of, write

ALL = 0  # the group of every worker, where no groups= were given; else the first one


class Groups:
    """Which workers share an arena.

    Args:
        groups: the indices of each group's workers; None: all workers are one group.
    """

    def __init__(self, groups: Sequence[Sequence[int]] | None) -> None:
        self.one = groups is None
        self._of: dict[int, int] = {}
        for number, group in enumerate(groups or ()):
            for worker in group:
                if worker in self._of:
                    raise ValueError(f"each worker is in one group, but worker {worker} is in several of {groups}")
                self._of[worker] = number

    def of(self, worker: int) -> int:
        """Which group a worker belongs to. Raises ValueError when it is in none."""
        if self.one:
            return ALL
        if worker not in self._of:
            raise ValueError(f"worker {worker} is in none of the groups; groups= must list every worker once")
        return self._of[worker]

    def of_all(self, workers: Collection[int], everybody: Collection[int]) -> list[int]:
        """The groups of these workers, which must be whole groups of `everybody`."""
        if self.one and len(workers) == len(everybody):
            return [ALL]
        wanted = {self.of(worker) for worker in workers}
        for other in everybody:
            if other not in workers and self.of(other) in wanted:
                group = sorted(worker for worker in everybody if self.of(worker) == self.of(other))
                split = [[worker for worker in group if (worker in workers) == here] for here in (True, False)]
                raise ValueError(
                    f"workers {group} share one arena, so a send cannot reach {split[0]} alone; split them with "
                    f"groups={split}, or send to all of them"
                )
        return sorted(wanted)


class ArenaOptions(NamedTuple):
    """How arenas are made; see SharedMemWeightSyncScheme."""

    slots: int
    timeout: float
    partial: bool = False
    dtype: Dtypes = None
    device: torch.device | str | None = None
    groups: Sequence[Sequence[int]] | None = None


class ModelArenas:
    """The arenas of one model, by group. The groups share version numbers, and skip what a send to others used.

    The first weights make all of them. With `partial` they also say which leaves the arenas have; later weights may
    lack any of these.

    Args:
        model_id: for errors.
        options: how they are made.
        given: a Publisher of the user's own, which is the arena of all workers.

    Attributes:
        registered: a TensorDict of the user's own: the first version, and it shows each later one.
        newest: the writer of the arena that has the newest version; None when there is no arena yet.
        in_use: has a worker applied a version, or may one that is late?
    """

    def __init__(self, model_id: str, options: ArenaOptions, given: Publisher | None = None) -> None:
        self._model_id = model_id
        self._options = options
        self._given = given
        self.registered: TensorDictBase | None = None
        self.newest: Writer | None = None
        self.in_use = False
        self._without_state: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that have no extra state
        self.by_group: dict[int, Publisher] = {}
        if given is not None:
            self._take({ALL: given})
        self._outside: dict[Key, torch.Tensor] | None = None  # leaves of the registered that did not move
        # Without a warning: a scheme of this shape has no close(), so collecting it is the normal end.
        self._owned: list[Publisher] = []
        util.Finalize(self, _close_all, (self._owned,), exitpriority=25)

    @property
    def version(self) -> int:
        """The newest version; 0 when there is no arena yet."""
        return 0 if self.newest is None else self.newest.current[0]

    @property
    def source(self) -> Weights | None:
        """What is published when no other weights are known: the registered, or those of the user's own Publisher."""
        return self.registered if self._given is None else writer_of(self._given).source

    def open(self, source: Weights, version: int, readers: int) -> None:
        """Make the arenas of this source, if there are none.

        Raises as Publisher() does, and ManifestMismatch for extra state, which is no tensor; then nothing is made.
        """
        if self.by_group:
            return
        self._refuse_state(source)
        content = _with_paths(source)
        try:
            for _ in self._options.groups or [()]:
                self._owned.append(self._make(content, version, readers))
        except BaseException:
            _close_all(self._owned)
            raise
        self._take(dict(enumerate(self._owned)))
        if source is self.registered:
            self._outside = self._move(self.registered)

    def _refuse_state(self, source: Weights) -> None:
        """Raise ManifestMismatch for extra state; a module is looked at once."""
        if isinstance(source, TensorDictBase) or (isinstance(source, nn.Module) and source in self._without_state):
            return
        if states := leaves_of(source)[1]:
            whose = ", ".join(".".join(path) if path else "the model itself" for path in states)
            raise ManifestMismatch(
                f"{self._model_id!r} has extra state (get_extra_state() of {whose}), which shared memory does not "
                "carry; nothing was sent. Keep it in buffers, or use MultiProcessWeightSyncScheme"
            )
        if isinstance(source, nn.Module):
            self._without_state.add(source)

    def _make(self, source: Weights, version: int, readers: int) -> Publisher:
        options, dtype = self._options, self._options.dtype
        if options.partial:
            dtype = WeightStrategy(dtype=dtype, partial=True).usable_dtype(leaves_of(source)[0])
        publisher = Publisher(
            source,
            slots=options.slots,
            max_readers=max(64, 2 * readers),
            device=options.device,
            dtype=dtype,
            include=["*"] if options.partial else None,  # a worker's module may have other leaves besides
            timeout=options.timeout,
            first_version=version,
        )
        writer_of(publisher).source = None  # each send has its own
        return publisher

    def _take(self, publishers: dict[int, Publisher]) -> None:
        self.by_group = publishers
        self.newest = writer_of(publishers[ALL])

    def publish(self, source: Weights, groups: Sequence[int], version: int, readers: int, deadline: float) -> None:
        """Make `source` the newest version for these groups. `version`: at least this number.

        Raises as Publisher() and Publisher.publish() do, before anything is written, for weights that do not fit.
        """
        if not groups:
            return
        if isinstance(source, nn.Module):  # an arena has no key to refuse it by
            self._refuse_state(source)
        if not self.by_group:
            first = source if self.registered is None else self.registered
            self.open(first, version, readers)
            if first is source:
                return
            version += 1
        content = _with_paths(source)
        writers = [writer_of(self.by_group[group]) for group in groups]
        whole = not self._options.partial
        if len(writers) > 1:
            for writer in writers:
                writer.check_weights(content, deadline, whole)
        for writer in writers:
            later = version if version > writer.next_version else None
            writer.publish(content, deadline, version=later, whole=whole)
            writer.wait_until_published(deadline)  # others are told of this version
            self.newest = writer
        if source is not self.registered and self._outside:
            self.show()

    @run_plainly
    def show(self) -> None:
        """Write the newest version into those leaves of the registered TensorDict that lie outside the arena."""
        if self._outside and (newest := self.newest) is not None:
            views = newest.arena.views(newest.current[1])
            write([(views[key], tensor) for key, tensor in self._outside.items()])

    @run_plainly
    def _move(self, weights: TensorDictBase) -> dict[Key, torch.Tensor]:
        """Make the leaves of a TensorDict the arena's own memory; those that stay outside, by key."""
        arena = writer_of(self.by_group[ALL]).arena
        found = collect(weights, arena.manifest, to_write=True)
        outside = {key: leaf for key, leaf in found.items() if key in arena.manifest.by_key}
        if self._options.groups is not None or arena.slots > 1 or arena.device_slab is not None:
            return outside
        views = arena.views(0, writable=True)
        for key, leaf in list(outside.items()):
            if _is_alone(leaf) and leaf.dtype == views[key].dtype:
                leaf.data = views[key]
                del outside[key]
        if outside and self._options.dtype is None:
            warnings.warn(
                f"{len(outside)} leaves of the TensorDict that is registered for {self._model_id!r}, such as "
                f"{'.'.join(next(iter(outside)))}, share their memory with other tensors, as a module's own parameters "
                "do, or lie elsewhere than in plain memory. They stay there, and each send copies them",
                stacklevel=5,
            )
        return outside

    def give_up(self) -> bool:
        """Drop arenas whose weights fit no worker, so that others can be sent; False for what the user registered."""
        if self._given is not None or self.registered is not None:
            return False
        self.close()
        return True

    def close(self) -> None:
        """End every arena that was made here. Idempotent. Raises WriterBusy for one that another thread writes."""
        _close_all(self._owned)
        self.by_group, self.newest = {}, None


def _is_alone(tensor: torch.Tensor) -> bool:
    """Does no other tensor show its memory, in plain memory of the host?"""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not shown_by_others([tensor], [tensor])
    )


def _with_paths(source: Any) -> Any:
    """The same weights; of a TensorDict each dotted key as a path, as modules have them."""
    if isinstance(source, TensorDictBase) and has_dotted_keys(source):
        return WeightStrategy().extract_weights(source)
    return source


def _close_all(publishers: list[Publisher]) -> None:
    while publishers:
        publishers[-1].close()
        publishers.pop()
