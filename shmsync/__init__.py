"""shmsync: shared-memory, zero-copy weight sync for multiprocess PyTorch on one machine.

trainer:  pub = shmsync.Publisher(model);  pub.publish()  or  with pub.update() as weights: ...
worker:   sub = shmsync.Subscriber(handle);  sub.bind(model)  or  with sub.read() as section: ...
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if not _sys.platform.startswith("linux"):
    raise ImportError("shmsync runs on Linux only: it needs memfd seals, futexes and pidfds, which this system lacks")

from ._native import ReadSection
from .engine.publisher import Publisher
from .engine.stats import PublisherStats, ReaderInfo, SubscriberStats
from .engine.subscriber import Snapshot, Subscriber, attach
from .engine.timing import Latency
from .errors import (
    AckTimeout,
    ArenaCorrupt,
    ArenaExists,
    ArenaNotFound,
    ClosedError,
    ForkedHandle,
    ManifestMismatch,
    NoSpace,
    Poisoned,
    ProtocolError,
    PublishTimeout,
    ReaderStalled,
    ReaderTableFull,
    ShmSyncError,
    WorkerDied,
    WriterBusy,
    WriterDied,
)
from .memory.process import ProcessState
from .memory.segment import Handle
from .schemes import (
    MPTransport,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    TransportBackend,
    WeightReceiver,
    WeightSender,
    WeightStrategy,
    WeightSyncScheme,
)

if _TYPE_CHECKING:
    from .schemes import (
        DistributedTransport,
        DistributedWeightSyncScheme,
        RayActorTransport,
        RayModuleTransformReceiver,
        RayModuleTransformScheme,
        RayModuleTransformSender,
        RayTransport,
        RayWeightSyncScheme,
        RayWeightUpdater,
        RPCTransport,
        RPCWeightSyncScheme,
        WeightUpdaterBase,
    )

__version__ = "0.1.0"

__all__ = [
    "AckTimeout",
    "ArenaCorrupt",
    "ArenaExists",
    "ArenaNotFound",
    "ClosedError",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "ForkedHandle",
    "Handle",
    "Latency",
    "MPTransport",
    "ManifestMismatch",
    "MultiProcessWeightSyncScheme",
    "NoSpace",
    "NoWeightSyncScheme",
    "Poisoned",
    "ProcessState",
    "ProtocolError",
    "PublishTimeout",
    "Publisher",
    "PublisherStats",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "ReadSection",
    "ReaderInfo",
    "ReaderStalled",
    "ReaderTableFull",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "ShmSyncError",
    "Snapshot",
    "Subscriber",
    "SubscriberStats",
    "TransportBackend",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncScheme",
    "WeightUpdaterBase",
    "WorkerDied",
    "WriterBusy",
    "WriterDied",
    "attach",
]


def __getattr__(name: str) -> _Any:
    from . import schemes

    if name in __all__:
        return getattr(schemes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
