"""Proof of delivery, in the worker: does what its modules hold agree with the checksums of the version?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ...errors import ArenaNotFound, ManifestMismatch, NotDelivered
from ...memory.arena import Arena
from ...memory.control import segment
from ...memory.devices import has_address
from ...memory.manifest import Key, Leaf, Manifest
from ...memory.torch_modes import plainly
from ..source.leaf_check import problem_with
from ..source.sources import EVERYTHING, collect, not_saved
from ..source.tied import second_names
from ..source.wrappers import unwrapped
from .checksums import checksum_of, checksums_in

_log = logging.getLogger("shmsync")
_SHOWN = 8  # leaves that an error lists


class Proof(NamedTuple):
    """What verify() has found to be delivered.

    Attributes:
        version: that the workers have.
        leaves: how many leaves each of them has compared; tied ones count under each of their names.
        unsent: leaves of the modules that are none of the arena's, and so of the worker alone.
        workers: those that have proved it, by index, or as "pid N".
    """

    version: int
    leaves: int
    unsent: tuple[str, ...] = ()
    workers: tuple[int | str, ...] = ()


class HeldTensors(NamedTuple):
    """What one module holds."""

    module: str
    tensors: Mapping[Key, torch.Tensor]
    leaf_of: Callable[[Key], Key]
    beside: frozenset[Key] = frozenset()  # leaves of the arena that are none of its tensors
    private: frozenset[Key] = frozenset()  # its own tensors that are never sent: state_dict() lacks them


class Verifiable(Protocol):
    """What is verified: a subscriber in a section that is pinned."""

    arena: Arena
    followers: list[Any]

    @property
    def name(self) -> str:
        """Of the arena."""

    @property
    def held(self) -> tuple[int, int]:
        """The version and the slot of the open section."""

    def use_copies(self) -> None:
        """Order the current stream behind the renewal of private copies."""


def verify_held(path: Verifiable, modules: Iterable[nn.Module] = ()) -> Proof:
    """Compare, inside a pinned section. Raises NotDelivered, which names every leaf that differs."""
    version, slot = path.held
    looking = _Look(path.arena, version, slot)
    followers = [follower for follower in path.followers if hasattr(follower, "held")]
    held = [each for follower in followers if (each := follower.held()) is not None]
    held += [held_by(module, path.arena.manifest) for module in modules]
    path.use_copies()
    with plainly():
        looking.at_the_arena()
        for each in held:
            looking.at(each)
    if looking.wrong:
        raise _not_delivered(looking, path.name)
    return Proof(version, len(path.arena.manifest.leaves), tuple(dict.fromkeys(looking.unsent)))


def held_by(module: nn.Module, manifest: Manifest) -> HeldTensors:
    """What a module holds that may not be bound."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"verify() takes torch.nn.Module objects, not a {type(module).__name__}")
    root = unwrapped(module)
    tensors = collect(root, EVERYTHING, watch=False).tensors
    second = second_names(tensors, manifest.by_key)
    return HeldTensors(
        type(root).__name__, tensors, lambda key: second.get(key, key), private=frozenset(not_saved(root))
    )


def refuse_succeeded(path: Verifiable) -> None:
    """Raise NotDelivered when the publisher is gone and another one has its arena's name."""
    try:
        session = segment.session_of(path.name)
    except ArenaNotFound:  # another user has the name now
        return
    read = path.arena.session
    if session is not None and session != read:
        raise NotDelivered(
            f"this subscriber reads session {read.hex()[:8]} of arena {path.name!r}, whose publisher is gone; "
            f"session {session.hex()[:8]} has taken its place. Attach to that one, or use follow=True",
            version=path.held[0],
        )


class _Look:
    """The comparison of one version; collects what differs."""

    def __init__(self, arena: Arena, version: int, slot: int) -> None:
        self.version = version
        self.wrong: dict[str, tuple[str, str]] = {}  # "Net.head.weight": its leaf, and what is there
        self.unsent: list[str] = []
        self._arena, self._slot = arena, slot
        self._sums = checksums_in(arena, slot)
        self._views = arena.views(slot)

    def at_the_arena(self) -> None:
        """The published bytes themselves: every name of a place shows one memory, so each place is read once."""
        seen: set[int] = set()
        for leaf in self._arena.manifest.leaves:
            if leaf.nbytes and leaf.offset not in seen:
                seen.add(leaf.offset)
                if checksum_of(self._views[leaf.key], leaf.strides) != self._sums[leaf.offset]:
                    self.wrong[f"the arena's {leaf.name}"] = leaf.name, "was written after it was published"

    def at(self, held: HeldTensors) -> None:
        """One module."""
        by_key = self._arena.manifest.by_key
        missing = by_key.keys() - held.beside
        for key, tensor in held.tensors.items():
            leaf = by_key.get(held.leaf_of(key))
            name = ".".join(key)
            if leaf is None:
                if key not in held.private:
                    self.unsent.append(name)
                continue
            missing.discard(key if key in by_key else leaf.key)
            try:
                what = self._differs(leaf, tensor)
            except Exception:  # torch's own, of a kind of tensor that has no values yet, or none that can be read
                what = f"is a {type(tensor).__name__} that cannot be compared"
            if what:
                self.wrong[f"{held.module}.{name}"] = leaf.name, what
        for key, leaf in by_key.items():
            if key in missing:
                self.wrong[f"{held.module}.{leaf.name}"] = leaf.name, "is not there (any more)"

    def _differs(self, leaf: Leaf, tensor: torch.Tensor) -> str:
        """What is in the place of this leaf; empty: its value."""
        on_meta = isinstance(tensor, torch.Tensor) and tensor.device.type == "meta"
        if not on_meta and problem_with(tensor):
            return f"is a {type(tensor).__name__} that cannot be compared"
        if tuple(tensor.shape) != leaf.shape:
            return f"has shape {tuple(tensor.shape)} instead of {leaf.shape}"
        if not leaf.nbytes:
            return "" if tensor.dtype == leaf.dtype else f"is {tensor.dtype} instead of {leaf.dtype}"
        view = self._views[leaf.key]
        if on_meta:
            return "is on the meta device: it has no values"
        if tensor.dtype != leaf.dtype:
            # Casts are deterministic, so the published value, cast in the same way, has the same bytes.
            if checksum_of(tensor) == checksum_of(view.to(tensor.dtype)):
                return ""
            return f"is not the published value cast to {tensor.dtype}"
        same = tensor.device == view.device and has_address(tensor) and tensor.data_ptr() == view.data_ptr()
        if same and tensor.stride() == view.stride():
            return ""  # the arena's own bytes, which were compared
        found = checksum_of(tensor, leaf.strides)
        if found == self._sums[leaf.offset]:
            return ""
        return self._whose(leaf, tensor, found)

    def _whose(self, leaf: Leaf, tensor: torch.Tensor, found: int) -> str:
        for slot in range(self._arena.slots):
            if slot != self._slot and checksums_in(self._arena, slot)[leaf.offset] == found:
                return "has the value of another version"
        if self._arena.overlaps(tensor):
            return "shows another place of the arena"
        return "has other values, in private memory"


class Verdict:
    """The answer to the publisher's question, as 32 bits: what, how many leaves, and the first of them."""

    # The last one: a bound module was changed, and cannot show the version.
    _UNKNOWN, _HOLDS, _DIFFERS, UNUSABLE = (kind << 30 for kind in range(4))
    _COUNTED, _NUMBERED = (1 << 10) - 1, (1 << 20) - 1

    @classmethod
    def of(cls, path: Verifiable) -> int:
        """Of a subscriber, inside a pinned section. The publisher has asked, so the section goes on whatever it is.

        Raises ManifestMismatch for a bound module that was changed.
        """
        try:
            verify_held(path)
        except NotDelivered as error:
            names = {leaf.name: number for number, leaf in enumerate(path.arena.manifest.leaves)}
            first = min(names[error.leaves[0]] if error.leaves else cls._NUMBERED, cls._NUMBERED)
            return cls._DIFFERS | min(len(error.leaves), cls._COUNTED) << 20 | first
        except ManifestMismatch:
            raise
        except Exception:
            _log.warning("arena %r: what this process holds could not be compared", path.name, exc_info=True)
            return cls._UNKNOWN
        return cls._HOLDS

    @classmethod
    def problem(cls, found: int, manifest: Manifest) -> tuple[str, str]:
        """What an answer says is wrong, and the leaf that it names; "" when nothing is wrong."""
        kind = found >> 30 << 30
        if kind == cls._HOLDS:
            return "", ""
        if kind == cls._UNKNOWN:
            return "could not compare what it holds, and its log says why", ""
        if kind == cls.UNUSABLE:
            return "has a bound module that was changed and cannot show it", ""
        count, number = found >> 20 & cls._COUNTED, found & cls._NUMBERED
        name = manifest.leaves[number].name if number < len(manifest.leaves) else ""
        return f"holds something else in {count} place(s), such as {name or 'a leaf'}", name


def _not_delivered(looking: _Look, name: str) -> NotDelivered:
    wrong = looking.wrong
    shown = "; ".join(f"{where} {what}" for where, (_, what) in list(wrong.items())[:_SHOWN])
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return NotDelivered(
        f"{len(wrong)} tensor(s) are not version {looking.version} of arena {name!r}: {shown}{more}. Bind the module "
        "that this process computes with, again if its tensors were replaced",
        version=looking.version,
        leaves=dict.fromkeys(leaf for leaf, _ in wrong.values()),
    )
