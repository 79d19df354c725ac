"""Weight-sync schemes: who sends which model to whom, and when it is applied. The shape is TorchRL's API.

Each name is imported when it is first used: a scheme needs torch, and one for several machines needs more.
May be imported by collectors and integrations.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .api import TransportBackend, WeightSyncScheme
    from .multiprocess import MPTransport, MultiProcessWeightSyncScheme
    from .none import NoWeightSyncScheme
    from .receiver import WeightReceiver
    from .remote.distributed import DistributedTransport, DistributedWeightSyncScheme
    from .remote.ray import (
        RayActorTransport,
        RayModuleTransformReceiver,
        RayModuleTransformScheme,
        RayModuleTransformSender,
        RayTransport,
        RayWeightSyncScheme,
    )
    from .remote.rpc import RPCTransport, RPCWeightSyncScheme
    from .remote.updater import RayWeightUpdater, WeightUpdaterBase
    from .sender import WeightSender
    from .shared_memory import SharedMemTransport, SharedMemWeightSyncScheme
    from .strategy import WeightStrategy

_NAMES = {
    ".api": "TransportBackend WeightSyncScheme",
    ".multiprocess": "MPTransport MultiProcessWeightSyncScheme",
    ".none": "NoWeightSyncScheme",
    ".receiver": "WeightReceiver",
    ".remote.distributed": "DistributedTransport DistributedWeightSyncScheme",
    ".remote.ray": "RayActorTransport RayModuleTransformReceiver RayModuleTransformScheme RayModuleTransformSender "
    "RayTransport RayWeightSyncScheme",
    ".remote.rpc": "RPCTransport RPCWeightSyncScheme",
    ".remote.updater": "RayWeightUpdater WeightUpdaterBase",
    ".sender": "WeightSender",
    ".shared_memory": "SharedMemTransport SharedMemWeightSyncScheme",
    ".strategy": "WeightStrategy",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

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
