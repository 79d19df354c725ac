"""The slab: the memfd, or the memory of a device, that holds the weights of an arena.

A memfd is memory without a name, which other processes open through /proc and which its seals protect. It disappears
with its last mapping, so it cannot be left behind. Its maker keeps a descriptor; a reader opens it by the pid of the
maker and the number of the descriptor, and knows it by its inode. So nothing but a few numbers has to travel, and no
descriptor can be lost on the way. A `Sealed` is another one: it carries weights beside a message.

The mapping of a storage belongs to torch, so the tensors over it are real shared tensors, and it lives exactly as long
as the last of them; it keeps no descriptor. For a read-only mapping torch first maps a dummy file of equal size; then
the memfd is mapped over it. Functions that call torch import it themselves: the command line needs none.

A memfd is not bound by the size of /dev/shm. One that is too large raises no error; later, the kernel kills a process
for lack of memory. So its size is first compared with the memory that the machine and each enclosing cgroup have left.

INV: after create() no process can map the slab writable, unprotect a mapping of it, write() to it, or resize it; the
     one writable mapping is the publisher's, and a forked child finds a read-only one in its place.
INV: no process resizes a Sealed, or writes into it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import psutil

from .. import _native
from ..errors import ArenaNotFound, NoSpace, ShmSyncError, WriterDied
from .process import Peer, close, close_in_children, me, owner_word, pid_of, refusals

if TYPE_CHECKING:
    import torch


SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_WRITE, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x8, 0x10
_F_ADD_SEALS = 1033

_NAME_BYTES = 249  # of a memfd's name that Linux allows
_PIECE_ALIGNMENT = 64  # bytes
_AT_ONCE = 64 << 20  # bytes of one write, so that an interrupt is noticed
_MADV_POPULATE_READ = 22  # since Linux 5.14
# Of cgroups v1 and v2: the files of limit and usage, and the part of the usage that can be taken back; of kills.
_ROOM = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_KILLS = {1: "memory.oom_control", 2: "memory.events"}
_UNLIMITED = 1 << 60  # v1 writes a number near 2^63 for "no limit"


class Slab(NamedTuple):
    """A mapped slab. `writable` is None in a subscriber."""

    readonly: torch.UntypedStorage
    writable: torch.UntypedStorage | None
    fd: int = -1  # by which subscribers open a publisher's memfd
    inode: int = 0


def create(slots: int, slot_bytes: int, name: str) -> Slab:
    """Make, fill and seal a slab. Raises NoSpace, before it allocates anything, when memory does not suffice.

    `name`: its arena's, by which /proc/<pid>/maps and lsof show it, and for what is said of a fault in it.
    """
    needed = slots * slot_bytes
    cure = "use fewer slots, a smaller dtype=, or exclude= what workers do not need"
    available = refuse_too_large(needed, f"{slots} slot(s) of {slot_bytes:,} bytes", cure)
    fd = os.memfd_create(f"shmsync:{name}"[:_NAME_BYTES], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with ExitStack() as undo:
        undo.callback(close, fd)
        try:
            os.posix_fallocate(fd, 0, needed)
        except OSError as error:
            raise NoSpace(
                f"the system refused {needed:,} bytes for the slab, though {available:,} seemed available: "
                f"{error.strerror}; free memory, or use fewer slots or a smaller dtype="
            ) from error
        add_seals(fd, SEAL_SHRINK | SEAL_GROW)
        writable = map_shared(fd, needed)
        address = writable.data_ptr()
        _native.populate(address, needed)
        add_seals(fd, SEAL_FUTURE_WRITE | SEAL_SEAL)
        slab = Slab(map_readonly(fd, needed), writable, fd, os.fstat(fd).st_ino)
        # A forked child is no publisher: a stray optimizer step there reaches no weights, as long as the mapping lives
        # (tensors kept from update() outlive close()). Not by mprotect(): the sealed memfd refuses that.
        protect = partial(_native.map_readonly_over, address, needed, fd)
        close_in_children(protect, partial.__call__)
        weakref.finalize(writable, lambda fd, _: close(fd), fd, protect).atexit = False
        undo.pop_all()
        for storage in (slab.readonly, writable):
            _explain_faults(storage, needed, name)
        return slab


def attach(header: _native.Header, name: str) -> Slab:
    """Map the slab of a live publisher read-only, if it is still the one that this header describes.

    `name`: its arena's, for what is said of a fault in it.
    """
    place = MemfdAt(header.owner, header.slab_fd, header.slab_inode, header.slots * header.slot_bytes)
    with opened_at(place, f"the slab of arena {name!r}", partial(_gone, header.owner)) as opened:
        slab = Slab(map_readonly(opened, place.size), None)
        _explain_faults(slab.readonly, place.size, name)
        return slab


def _gone(owner: int, error: OSError | None) -> WriterDied | ArenaNotFound:
    pid = pid_of(owner)
    if isinstance(error, PermissionError):  # the segment is of this user, or attaching would have ended there
        return ArenaNotFound(
            f"{error.filename} may not be opened by uid {os.geteuid()}, though its arena is of that uid: the publisher "
            f"(pid {pid}) is not dumpable, as after setuid() or prctl(PR_SET_DUMPABLE, 0), or has capabilities "
            "that the worker lacks; start the publisher without them, as the user of the worker"
        )
    if not Peer(owner=owner).dead:
        return ArenaNotFound(f"the publisher (pid {pid}) has closed this arena; attach to its new one")
    return WriterDied(f"the publisher (pid {pid}) is gone, and its weights with it; restart it")


def _explain_faults(storage: torch.UntypedStorage, size: int, name: str) -> None:
    """Let a write where it may not be say so before the process dies of it, for as long as the mapping lives."""
    address = storage.data_ptr()
    _native.watch_faults(address, size, name)
    weakref.finalize(storage, _native.unwatch_faults, address).atexit = False


# Memfds of any kind.


class MemfdAt(NamedTuple):
    """What a reader needs to open it."""

    owner: int  # of the process that has the descriptor
    fd: int
    inode: int
    size: int


def add_seals(fd: int, seals: int) -> None:
    """Forbid what these seals forbid, in every process."""
    fcntl.fcntl(fd, _F_ADD_SEALS, seals)


@contextmanager
def opened_at(place: MemfdAt, what: str, gone: Callable[[OSError | None], ShmSyncError]) -> Iterator[int]:
    """Open the memory at `place`; yields a descriptor.

    `what`: its name in errors. Raises NoSpace, and the error that `gone` returns if the memory is gone or may not be
    opened; `gone` gets the OSError, or None.
    """
    with refusals(f"opening {what}"):
        try:
            fd = os.open(f"/proc/{pid_of(place.owner)}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
            raise gone(error) from error
    try:
        if os.fstat(fd).st_ino != place.inode:  # the descriptor's number was used again
            raise gone(None)
        yield fd
    finally:
        close(fd)


def map_shared(fd: int, size: int) -> torch.UntypedStorage:
    """A storage over a writable mapping of `fd`. Raises OSError."""
    import torch

    mmap.mmap(fd, size).close()  # raises the system's own error, where torch has a text and leaves its file open
    return cast("torch.UntypedStorage", torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, size))


def map_readonly(fd: int, size: int) -> torch.UntypedStorage:
    """A storage over a read-only mapping of `fd`."""
    dummy = os.memfd_create("shmsync-dummy", os.MFD_CLOEXEC)
    try:
        os.ftruncate(dummy, size)
        storage = map_shared(dummy, size)
    finally:
        close(dummy)
    _native.map_readonly_over(storage.data_ptr(), size, fd)
    return storage


# Weights beside a message.


class Sealed:
    """Pieces of bytes that no process can change, in a memfd. Raises NoSpace.

    It goes when this object is gone and no process maps it any more.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self.spans: list[tuple[int, int]] = []
        size = 0
        for piece in pieces:
            begin = -(-size // _PIECE_ALIGNMENT) * _PIECE_ALIGNMENT
            size = begin + piece.nbytes
            self.spans.append((begin, size))
        refuse_too_large(size, "weights to send", "free some, or send fewer weights or a smaller dtype")
        with refusals("making room for weights"):
            fd = os.memfd_create("shmsync-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._closing = weakref.finalize(self, close, fd)
            self._closing.atexit = False
            close_in_children(self, Sealed.close)
            try:
                for (begin, _), piece in zip(self.spans, pieces, strict=True):
                    _write(fd, piece, begin)
                add_seals(fd, SEAL_SEAL | SEAL_SHRINK | SEAL_GROW | SEAL_WRITE)
                self.place = MemfdAt(me().owner, fd, os.fstat(fd).st_ino, size)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Give it up: no process can open it any more. Idempotent."""
        self._closing()


def _write(fd: int, piece: memoryview, at: int) -> None:
    done = 0
    while done < piece.nbytes:
        done += os.pwrite(fd, piece[done : done + _AT_ONCE], at + done)


def reachable(owner: int) -> bool:
    """Can this process open what that one has? Not across users and containers."""
    try:
        os.listdir(f"/proc/{pid_of(owner)}/fd")
        return bool(_native.may_be_same_owner(owner_word(pid_of(owner)), owner))
    except (OSError, ValueError):
        return False


def pieces_at(place: MemfdAt, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The pieces that lie there: views of one private mapping, which their reader may change for itself.

    Raises WriterDied when the maker is gone or has given them up, and NoSpace.
    """

    def gone(error: OSError | None) -> WriterDied:
        return WriterDied(
            f"the sender (pid {pid_of(place.owner)}) has died, or has given these weights up, before they were read; "
            "they come again with its next send"
        )

    if place.size == 0:
        return [memoryview(b"")] * len(spans)
    with opened_at(place, "the memory of weights", gone) as fd, refusals("mapping the weights of the sender"):
        mapping = mmap.mmap(fd, place.size, access=mmap.ACCESS_COPY)
    with suppress(OSError, ValueError):  # older kernels bring the pages in one by one
        mapping.madvise(_MADV_POPULATE_READ)
    whole = memoryview(mapping)
    return [whole[begin:until] for begin, until in spans]


# How much memory this process may still take.


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now: the least that the machine and the enclosing cgroups (v1 or v2) have left."""
    return min([psutil.virtual_memory().available, *cgroup_room(root)])


def refuse_too_large(needed: int, what: str, cure: str) -> int:
    """The bytes that are available. Raises NoSpace if `what` needs more of them; `cure`: the next step."""
    available = available_bytes()
    if needed > available:
        raise NoSpace(
            f"{what} need {needed:,} bytes but {available:,} are available to this process (machine and cgroup), and "
            f"nothing was taken; {cure}"
        )
    return available


def memory_cgroups(root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """The cgroups that count this process's memory: the version of each, 1 or 2, and its folder; its own one first.

    In a container their path may be the host's and absent here; what is there is the root of the mount, which is last.
    """
    for line in (_content(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            version, mount = (1, root / "sys/fs/cgroup/memory") if controllers else (2, root / "sys/fs/cgroup")
            folder = mount / path.lstrip("/")
            levels = [folder, *folder.parents]
            yield from ((version, level) for level in levels[: levels.index(mount) + 1])


def cgroup_room(root: Path = Path("/")) -> list[int]:
    """Bytes that each enclosing cgroup with a limit has left."""
    found = (_room(folder, *_ROOM[version]) for version, folder in memory_cgroups(root))
    return [left for left in found if left is not None]


def memory_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for lack of memory in this process's cgroup, which its workers share.

    It counts them, and does not say which. 0 where that cannot be found out.
    """
    for version, folder in memory_cgroups(root):
        if counts := _content(folder / _KILLS[version]):
            return int(dict(line.split() for line in counts.splitlines()).get("oom_kill", 0))
    return 0


def _room(folder: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    limit_text, usage, details = (_content(folder / name) for name in (limit_name, usage_name, "memory.stat"))
    if limit_text is None or usage is None or details is None:
        return None
    try:
        if limit_text.strip() == "max" or int(limit_text) >= _UNLIMITED:
            return None
        statistics = dict(line.split() for line in details.splitlines())
        # The kernel reclaims the page cache of files before it kills anything.
        return max(0, int(limit_text) - int(usage) + int(statistics.get(reclaimable, 0)))
    except ValueError:
        return None


def _content(path: Path) -> str | None:
    """None where there is no such limit, or none that this process may see."""
    try:
        return path.read_text()
    except OSError:
        return None
