"""Weight-sync schemes: who sends which model to whom, and when it is applied. The shape is TorchRL's API.

Each name is imported when it is first used: a scheme needs torch, and one for several machines needs more.
May be imported by collectors and integrations.
"""

# ruff: noqa: F405  # the lazy names come from the star
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .api import TransportBackend, WeightSyncScheme
    from .multiprocess import MPTransport, MultiProcessWeightSyncScheme
    from .none import NoWeightSyncScheme
    from .receiver import WeightReceiver
    from .remote import *  # noqa: F403
    from .sender import WeightSender
    from .shared_memory import SharedMemTransport, SharedMemWeightSyncScheme
    from .strategy import WeightStrategy

_HOMES = {
    "DistributedTransport": ".remote.distributed",
    "DistributedWeightSyncScheme": ".remote.distributed",
    "MPTransport": ".multiprocess",
    "MultiProcessWeightSyncScheme": ".multiprocess",
    "NoWeightSyncScheme": ".none",
    "RPCTransport": ".remote.rpc",
    "RPCWeightSyncScheme": ".remote.rpc",
    "RayActorTransport": ".remote.ray",
    "RayModuleTransformReceiver": ".remote.ray",
    "RayModuleTransformScheme": ".remote.ray",
    "RayModuleTransformSender": ".remote.ray",
    "RayTransport": ".remote.ray",
    "RayWeightSyncScheme": ".remote.ray",
    "RayWeightUpdater": ".remote.updater",
    "SharedMemTransport": ".shared_memory",
    "SharedMemWeightSyncScheme": ".shared_memory",
    "TransportBackend": ".api",
    "WeightReceiver": ".receiver",
    "WeightSender": ".sender",
    "WeightStrategy": ".strategy",
    "WeightSyncScheme": ".api",
    "WeightUpdaterBase": ".remote.updater",
}

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
]


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(_import_module(_HOMES[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
