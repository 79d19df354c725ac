"""The errors of shmsync: one tree, so that `except ShmSyncError` catches all of them.

    ShmSyncError
    ├── ArenaNotFound      no arena of that name (any more)
    ├── ArenaExists        a live publisher has the name
    ├── ArenaCorrupt       the segment is not what its header says
    ├── NoSpace            no memory, descriptor or room in /dev/shm is left; nothing was changed
    ├── ManifestMismatch   keys, shapes, dtypes or devices differ; nothing was written          (ValueError)
    │   └── DataMismatch       what an environment or a policy gave does not fit its space
    ├── WriterBusy         a concurrent writer call, or a reader could not enter in time        (TimeoutError)
    │   ├── SubscriberBusy     another thread stays in a read section of this Subscriber
    │   └── DeviceBusy         a device has not done in time what the call waits for
    ├── WriterDied         the publisher is gone, and what was asked for needs it
    ├── Poisoned           the last update failed half way; a full publish() repairs it
    ├── ReaderStalled      readers hold every slot; nothing was written                         (TimeoutError)
    ├── ReaderTableFull    more subscribers than max_readers
    ├── PublishTimeout     the awaited version was not published                                (TimeoutError)
    ├── WorkerDied         published, but these workers died before they applied it
    ├── WorkerFailed       what the function of a worker of Workers raised; its cause is that exception
    ├── AckTimeout         published, but these workers have not applied it in time             (TimeoutError)
    ├── ProtocolError      the call makes no sense here, for example a publish inside one's own read section
    ├── DeviceFailed       a device failed, perhaps in what it was asked for earlier
    ├── ClosedError        the handle, or the publisher, is closed
    └── ForkedHandle       the handle belongs to the parent process

Every error carries `version` (the version it is about, or None), `missing` (the workers it names: the index given as
`worker=`, or "pid N" for a subscriber without one), and `help`, the address of its entry in the troubleshooting page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "AckTimeout", "ArenaCorrupt", "ArenaExists", "ArenaNotFound", "ClosedError", "DataMismatch", "DeviceBusy",
    "DeviceFailed", "ForkedHandle", "ManifestMismatch", "NoSpace", "Poisoned", "ProtocolError",
    "PublishTimeout", "ReaderStalled", "ReaderTableFull", "ShmSyncError", "SubscriberBusy", "WorkerDied",
    "WorkerFailed", "WriterBusy", "WriterDied",
]  # fmt: skip

# Where the pages of the documentation are, as pyproject.toml says it too. It stands here because an error may be about
# a process that can open no file any more.
DOCUMENTATION = "https://github.com/shmsync/shmsync/blob/main/docs"


class ShmSyncError(Exception):
    """Base of every error of this package.

    `help` is the address of the entry of the class in the troubleshooting page. It is a note of the exception, so that
    a traceback ends with it (from Python 3.11 on), and the message stays what it is.

    What to do: https://github.com/shmsync/shmsync/blob/main/docs/troubleshooting.md#shmsyncerror
    """

    help: str = f"{DOCUMENTATION}/troubleshooting.md#shmsyncerror"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a class of this file the address of its entry; others have that of their parent."""
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:
            cls.help = f"{DOCUMENTATION}/troubleshooting.md#{cls.__name__.lower()}"
            cls.__doc__ = cls.__doc__ and f"{cls.__doc__}\n\nWhat to do: {cls.help}"  # None under python -OO

    def __init__(self, message: str = "", *, version: int | None = None, missing: Iterable[int | str] = ()) -> None:
        super().__init__(message)
        self.version = version
        self.missing = list(missing)
        self.__notes__ = [f"help: {self.help}"]


class ArenaNotFound(ShmSyncError):
    """No arena of that name, or not any more."""


class ArenaExists(ShmSyncError):
    """A live publisher has the name."""


class ArenaCorrupt(ShmSyncError):
    """The segment is not what its header says."""


class NoSpace(ShmSyncError):
    """Memory, descriptors or room in /dev/shm do not suffice for the call; nothing was changed."""


class ManifestMismatch(ShmSyncError, ValueError):
    """Keys, shapes, dtypes or devices differ; the message lists every problem, and nothing was written."""


class DataMismatch(ManifestMismatch):
    """What an environment or a policy of a collector gave does not fit its space; it is not about weights."""


class WriterBusy(ShmSyncError, TimeoutError):
    """Another writer call is under way, or the writer kept a reader out until its deadline."""


class SubscriberBusy(WriterBusy):
    """Another thread stays in a read section of this Subscriber."""


class DeviceBusy(WriterBusy):
    """A device has not done in time what the call waits for."""


class WriterDied(ShmSyncError):
    """The publisher's process is gone."""


class Poisoned(ShmSyncError):
    """The last in-place update failed half way; a full publish() repairs it."""


class ReaderStalled(ShmSyncError, TimeoutError):
    """Readers hold every slot that could be written; nothing was written."""


class ReaderTableFull(ShmSyncError):
    """The arena has as many subscribers as max_readers."""


class PublishTimeout(ShmSyncError, TimeoutError):
    """The awaited version was not published in time."""


class WorkerDied(ShmSyncError):
    """Published, but the named workers died before they applied it."""


class WorkerFailed(ShmSyncError):
    """The function of the named worker raised; `__cause__` is what it raised, with the worker's traceback."""


class AckTimeout(ShmSyncError, TimeoutError):
    """Published, but the named workers have not applied it in time."""


class ProtocolError(ShmSyncError):
    """The call makes no sense in the state that this process is in."""


class DeviceFailed(ShmSyncError):
    """A device failed, perhaps in what it was asked for earlier; the `version` that it was publishing never came."""


class ClosedError(ShmSyncError):
    """The handle, or the publisher behind it, is closed."""


class ForkedHandle(ShmSyncError):
    """The handle was made in the parent process; make a new one after the fork."""
