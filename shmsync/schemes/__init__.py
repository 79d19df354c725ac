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
    from .none import NoWeightSyncScheme
    from .pipes.multiprocess import MPTransport, MultiProcessWeightSyncScheme
    from .pipes.shared_memory import SharedMemTransport, SharedMemWeightSyncScheme
    from .receiver import WeightReceiver
    from .remote import *  # noqa: F403
    from .sender import WeightSender
    from .strategy import WeightStrategy

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


_HOMES = {  # the others are in remote/
    "MPTransport": ".pipes.multiprocess",
    "MultiProcessWeightSyncScheme": ".pipes.multiprocess",
    "NoWeightSyncScheme": ".none",
    "SharedMemTransport": ".pipes.shared_memory",
    "SharedMemWeightSyncScheme": ".pipes.shared_memory",
    "TransportBackend": ".api",
    "WeightReceiver": ".receiver",
    "WeightSender": ".sender",
    "WeightStrategy": ".strategy",
    "WeightSyncScheme": ".api",
}


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(_import_module(_HOMES.get(name, ".remote"), __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
