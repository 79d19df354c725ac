"""Weight-sync schemes: who sends which model to whom, and when it is applied. The shape is TorchRL's API.

The schemes for several machines are imported when they are first used.
May be imported by collectors and integrations.
"""

# ruff: noqa: F405  # the lazy names come from the star
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ..engine.source.strategy import WeightStrategy
from .api import TransportBackend, WeightSyncScheme
from .none import NoWeightSyncScheme
from .pipes.multi_model import send_together
from .pipes.multiprocess import MPTransport, MultiProcessWeightSyncScheme
from .pipes.shared_memory import SharedMemTransport, SharedMemWeightSyncScheme
from .receiver import WeightReceiver
from .sender import WeightSender

if _TYPE_CHECKING:
    from .remote import *  # noqa: F403

__all__ = [
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncScheme",
    "WeightUpdaterBase",
    "send_together",
]


def __getattr__(name: str) -> _Any:
    if name in __all__:
        return getattr(_import_module(".remote", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
