"""shmsync: shared-memory, zero-copy weight sync for multiprocess PyTorch on one machine.

trainer:  pub = shmsync.Publisher(model);  pub.publish()  or  with pub.update() as weights: ...
worker:   sub = shmsync.Subscriber(handle);  sub.bind(model)  or  with sub.read() as section: ...
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if not _sys.platform.startswith("linux"):
    raise ImportError("shmsync runs on Linux only: it needs memfd seals, futexes and pidfds, which this system lacks")

try:
    from . import _native  # noqa: F401
except ImportError:
    from pathlib import Path as _Path

    _folder = _Path(__file__).parent
    if any(_folder.glob("_native*.so")):  # it is here, and cannot be loaded: its own error says why
        raise
    raise ImportError(
        f"{_folder} is a source folder of shmsync without its native core, which is built when it is installed; run "
        f"`pip install -e .` in {_folder.parent}, or start Python in another folder to use an installed shmsync"
    ) from None

from importlib import import_module as _import_module

from . import errors as _errors
from . import schemes as _schemes
from ._native import ReadSection
from .errors import *  # noqa: F403
from .memory.process import ProcessState
from .memory.segment import Handle, ReaderInfo

if _TYPE_CHECKING:
    from .engine.deadlines import Latency
    from .engine.publisher import Publisher
    from .engine.read.section_values import VersionStamp
    from .engine.stats import PublisherStats, SubscriberStats
    from .engine.subscriber import Snapshot, Subscriber, attach
    from .schemes import *  # noqa: F403
    from .workers import Workers

__version__ = "0.1.0"

__all__ = [
    "Handle",
    "Latency",
    "ProcessState",
    "Publisher",
    "PublisherStats",
    "ReadSection",
    "ReaderInfo",
    "Snapshot",
    "Subscriber",
    "SubscriberStats",
    "VersionStamp",
    "Workers",
    "attach",
]
__all__ += _errors.__all__
__all__ += _schemes.__all__


# Imported when they are first used: they need torch, which the command line starts without.
_LATER = {
    "Latency": ".engine.deadlines",
    "Publisher": ".engine.publisher",
    "PublisherStats": ".engine.stats",
    "Snapshot": ".engine.subscriber",
    "Subscriber": ".engine.subscriber",
    "SubscriberStats": ".engine.stats",
    "VersionStamp": ".engine.read.section_values",
    "Workers": ".workers",
    "attach": ".engine.subscriber",
}


def __getattr__(name: str) -> _Any:
    if name in _LATER:
        found = getattr(_import_module(_LATER[name], __name__), name)
    elif name in _schemes.__all__:
        found = getattr(_schemes, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
