"""An arena as one process maps it: control segment and slab, with the slots as TensorDict views."""

from __future__ import annotations

import logging
import operator
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .. import _native
from ..errors import ClosedError, DeviceFailed, NoSpace
from . import segment, slab
from .devices import Device, DeviceSlab, has_address
from .manifest import Key, Leaf, Manifest, fingerprint, tree
from .process import Peer, me, refusals
from .slab import Slab
from .torch_modes import plainly, run_plainly

if TYPE_CHECKING:
    from tensordict import TensorDict

_log = logging.getLogger("shmsync")

# Every arena mapped in this process: one slab may be mapped several times, and a publisher must know all its addresses.
_CPU = torch.device("cpu")
_mapped: weakref.WeakSet[Arena] = weakref.WeakSet()
mapped_so_far = 0  # arenas that this process has mapped: where it is the same, no slab has come to other addresses
_mapped_lock = threading.RLock()  # re-entrant: garbage collection may run finalisers while it is held


def _all_mapped() -> list[Arena]:
    with _mapped_lock:
        return list(_mapped)


def readonly_ranges() -> list[tuple[int, int]]:
    """[begin, end) of the read-only mapping of every arena of this process."""
    return [arena.readonly_range() for arena in _all_mapped() if arena.mapped]


def mapped_ranges() -> list[tuple[int, int]]:
    """[begin, end) of every mapping of every arena of this process."""
    return [span for arena in _all_mapped() for span in arena.spans()]


def arena_around(tensor: torch.Tensor, address: int) -> Arena | None:
    """The arena of this process in which a tensor lies whose storage begins at this address.

    It may also lie in a private copy that a Subscriber renews with each version.
    """
    for arena in filter(operator.attrgetter("mapped"), _all_mapped()):
        reader = None if arena.reader is None else arena.reader()
        if any(begin <= address < end for begin, end in arena.spans()) or (reader and reader.aliases(tensor)):
            return arena
    return None


def sessions_read() -> list[bytes]:
    """The sessions of the arenas that this process is attached to."""
    return [arena.session for arena in _all_mapped() if arena.reader is not None]


def show_failure(who: str, what: str, sessions: Collection[bytes]) -> None:
    """Let `shmsync list` and others show "`who` `what`" beside the arenas of these sessions that this process has.

    "" takes back what was shown for `who`, a worker that was started again.
    """
    for arena in _all_mapped():
        if arena.session in sessions and (what or arena.control.failure.startswith(f"{who} ")):
            arena.control.failure = f"{who} {what}" if what else ""


def lies_in(tensor: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> bool:
    """Does a tensor start in one of these ranges of addresses?"""
    address = tensor.data_ptr() if has_address(tensor) else 0
    return any(begin <= address < end for begin, end in ranges)


@dataclass(eq=False, repr=False)
class Arena:
    """Both parts of an arena as mapped in this process. Publisher and Subscriber each own one.

    INV: views of one slot are made once; the same tensor object serves every caller, and tied leaves.
    """

    control: _native.Control
    _slab: Slab | None
    manifest: Manifest
    slots: int
    session: bytes
    device_slab: DeviceSlab | None  # None: the slab lies in the host's memory
    reader: weakref.ref[_native.Reader] | None = None  # a Subscriber's; for publishers in this process
    live: tuple[Callable[[Any], Any], tuple[Any]] | None = None  # the call that gives its weights elsewhere
    pinned_slab: DeviceSlab | None = None  # one in the host's memory, as the device that copies from or to it has it
    _refused: list[Device] = field(default_factory=list)  # those that cannot pin it
    _views: dict[tuple[int, bool], dict[Key, torch.Tensor]] = field(default_factory=dict)
    _weights: dict[tuple[int, bool], TensorDict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        global mapped_so_far
        with _mapped_lock:
            _mapped.add(self)
            mapped_so_far += 1

    @property
    def torch_device(self) -> torch.device:
        """Where torch says that the tensors over the slab are."""
        return _CPU if self.device_slab is None else self.device_slab.device.torch_device

    @property
    def place(self) -> str:
        """The name of where the slab lies: "cpu", "cuda:0"."""
        return "cpu" if self.device_slab is None else self.device_slab.device.name

    @property
    def mapped(self) -> bool:
        """False after release()."""
        return self._slab is not None

    @property
    def slab(self) -> Slab:
        """The mapped slab. Raises ClosedError after release()."""
        if self._slab is None:
            raise ClosedError("this arena was closed in this process; attach again")
        return self._slab

    def views(self, slot: int, *, writable: bool = False) -> dict[Key, torch.Tensor]:
        """Each leaf of a slot as a tensor over the slab."""
        views = self._views.get((slot, writable))
        if views is None:
            views = self._views[slot, writable] = self._made_views(slot, writable)
        return views

    def made_views(self) -> list[torch.Tensor]:
        """The views that this process has made of the slab. On a device a reader's may share the writer's storage."""
        arenas = [arena for arena in _all_mapped() if arena.session == self.session]
        return [view for arena in arenas for made in list(arena._views.values()) for view in made.values()]

    @run_plainly  # kept for good: views made in inference mode could never be trained
    def _made_views(self, slot: int, writable: bool) -> dict[Key, torch.Tensor]:
        storage = self.slab.writable if writable else self.slab.readonly
        assert storage is not None, "only a publisher writes"
        start = slot * self.manifest.slot_bytes
        made: dict[tuple[Any, ...], torch.Tensor] = {}
        views = {}
        for leaf in self.manifest.leaves:
            # Tied leaves share an offset, and stay one tensor.
            identity = (leaf.offset, leaf.dtype, leaf.shape, leaf.strides, leaf.key if leaf.nbytes == 0 else None)
            if identity not in made:
                made[identity] = view(storage, leaf, start + leaf.offset)
            views[leaf.key] = made[identity]
        return views

    def weights(self, slot: int, *, writable: bool = False) -> TensorDict:
        """A slot as a TensorDict. Locked, because assigning a key would replace the view and reach no reader."""
        weights = self._weights.get((slot, writable))
        if weights is None:
            from .dotted import dotted

            with plainly():
                weights = dotted(nested(self.views(slot, writable=writable))).lock_()
                weights.live = self.live
            self._weights[slot, writable] = weights
        return weights

    def slot_address(self, slot: int) -> int:
        """Where a slot starts in the writable mapping."""
        assert self.slab.writable is not None, "only a publisher writes"
        return int(self.slab.writable.data_ptr()) + slot * self.manifest.slot_bytes

    def readonly_address(self, slot: int) -> int:
        """Where a slot starts in the read-only mapping."""
        return int(self.slab.readonly.data_ptr()) + slot * self.manifest.slot_bytes

    def readonly_range(self) -> tuple[int, int]:
        """[begin, end) of the read-only mapping."""
        begin = self.readonly_address(0)
        return begin, begin + self.slots * self.manifest.slot_bytes

    def spans(self) -> list[tuple[int, int]]:
        """[begin, end) of the mappings that this object has made; none after release()."""
        if self._slab is None:
            return []
        size = self.slots * self.manifest.slot_bytes
        storages = (self._slab.readonly, self._slab.writable)
        return [(each.data_ptr(), each.data_ptr() + size) for each in storages if each is not None]

    def ranges(self) -> list[tuple[int, int]]:
        """[begin, end) of every mapping of this arena's slab in this process."""
        return [span for arena in _all_mapped() if arena.session == self.session for span in arena.spans()]

    def overlaps(self, tensor: torch.Tensor) -> bool:
        """Does a tensor start in the slab, under any mapping of it in this process?"""
        return lies_in(tensor, self.ranges())

    def pin(self, device: Device) -> DeviceSlab | None:
        """Let this device copy from and to the slab in the host's memory by itself, until release().

        None: it cannot, or another device does.
        """
        if self.pinned_slab is None and device not in self._refused:
            writable = self.slab.writable
            storage = self.slab.readonly if writable is None else writable
            try:
                device.pin(storage, readonly=writable is None)
                try:
                    self.pinned_slab = DeviceSlab(device, storage, pinned=True)
                except BaseException:
                    device.unpin(storage)
                    raise
            except (DeviceFailed, NoSpace) as error:
                self._refused.append(device)
                _log.warning("weights go to and from %s at the speed of pageable memory: %s", device.name, error)
        return self.pinned_slab if self.pinned_slab is not None and self.pinned_slab.device is device else None

    def release(self) -> None:
        """Drop what this object holds; the mappings live until the last tensor over them dies."""
        if self.pinned_slab is not None:
            self.pinned_slab.free()
            self.pinned_slab = None
        if self._slab is not None and self.device_slab is not None:
            _free_on_device(self.device_slab, self.control)
        self._slab = None
        self._views.clear()
        self._weights.clear()


def create(
    name: str, manifest: Manifest, *, slots: int, max_readers: int, device: Device | None = None
) -> tuple[Arena, segment.Created]:
    """Make an arena; no process can attach to it before segment.make_ready(). Raises NoSpace, ArenaExists.

    `device`: where its slab lies; None: in the host's memory.
    """
    if device is not None and slots > _native.MAX_DEVICE_SLOTS:  # more than readers can hold
        raise ValueError(
            f"an arena on {device.name} has at most {_native.MAX_DEVICE_SLOTS} slots, not {slots}; use fewer"
        )
    with refusals(f"creating arena {name!r}"):
        follows = segment.last_version(name)
        session = secrets.token_bytes(16)
        text = manifest.to_json()
        owner, boot_id, pid_namespace = me()
        if device is None:
            memory = slab.create(slots, manifest.slot_bytes, name)
        else:
            size = slots * manifest.slot_bytes
            try:
                storage = device.allocate(size)
            except NoSpace:  # what closed publishers have kept is freed only now: that may wait for the whole device
                free_unused()
                storage = device.allocate(size)
            memory = Slab(storage, storage)
        device_slab = None if device is None else DeviceSlab(device, memory.readonly)
        created = segment.create(
            name,
            _native.segment_bytes(slots, max_readers, len(text)),
            follows=follows,
            session=session,
            owner=owner,
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            slots=slots,
            readers=max_readers,
            slot_bytes=manifest.slot_bytes,
            slab_kind=_native.SLAB_MEMFD if device is None else device.kind,
            slab_fd=memory.fd,
            slab_inode=memory.inode,
            slab_handle=b"" if device is None else device.export(memory.readonly),
            fingerprint=fingerprint(text),
            manifest=text,
        )
        return Arena(created.control, memory, manifest, slots, session, device_slab), created


# Memory of the host is counted by the system. That of a device may go with its owner, and CUDA leaves open what readers
# find there then. So a closed publisher keeps it until the last row of a living process is gone; each arena that this
# process closes on a device looks again, and one for which there is no room. It ends with the process in any case.
_lent: list[tuple[DeviceSlab, _native.Control]] = []
_lent_lock = threading.RLock()


def _free_on_device(place: DeviceSlab, control: _native.Control) -> None:
    """Give an arena's memory on a device back: now, or once no other process maps it."""
    free_unused()
    if place.reads is None and _open_elsewhere(control):
        with _lent_lock:
            _lent.append((place, control))
    else:
        place.free()


def free_unused() -> int:
    """Free the memory of closed arenas on devices that no process has open any more; how many are still lent."""
    with _lent_lock:
        for each in list(_lent):
            place, control = each
            if not _open_elsewhere(control):
                _lent.remove(each)
                place.free()
        return len(_lent)


def _open_elsewhere(control: _native.Control) -> bool:
    mine = me().owner
    return any(row.owner != mine and not Peer(owner=row.owner).dead for row in control.rows())


def nested(tensors: Mapping[Key, Any]) -> TensorDict:
    """Leaves by key path as a nested TensorDict."""
    from .dotted import tensordict_of

    def made(level: dict[str, Any]) -> TensorDict:
        return tensordict_of({key: made(each) if type(each) is dict else each for key, each in level.items()})

    return made(tree(tensors))


def view(storage: torch.UntypedStorage, leaf: Leaf, offset: int) -> torch.Tensor:
    """A tensor laid out as this leaf, over a storage, `offset` bytes from its start. Call it inside plainly()."""
    return torch.empty(0, dtype=leaf.dtype, device=storage.device).set_(
        storage, offset // leaf.dtype.itemsize, leaf.shape, leaf.strides
    )
