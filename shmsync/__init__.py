"""shmsync: shared-memory, zero-copy weight sync for multiprocess PyTorch on one machine.

trainer:  pub = shmsync.Publisher(model);  pub.publish()  or  with pub.update() as weights: ...
worker:   sub = shmsync.Subscriber(handle);  sub.bind(model)  or  with sub.read() as section: ...
"""

import sys as _sys

if not _sys.platform.startswith("linux"):
    raise ImportError("shmsync runs on Linux only: it needs memfd seals, futexes and pidfds, which this system lacks")

from ._native import ReadSection
from ._process import ProcessState
from ._segment import Handle
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
from .publisher import Publisher
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
from .stats import Latency, PublisherStats, ReaderInfo, SubscriberStats
from .subscriber import Snapshot, Subscriber, attach

__version__ = "0.1.0"

__all__ = [
    "AckTimeout",
    "ArenaCorrupt",
    "ArenaExists",
    "ArenaNotFound",
    "ClosedError",
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
    "WorkerDied",
    "WriterBusy",
    "WriterDied",
    "attach",
]
