"""The schemes for several machines. Importing them needs none of the packages that they stand on.

What another one is made of is in carrier, requests, transport and scheme: see docs/add-a-transport.md.
"""

# ruff: noqa: F401  # schemes/__init__ lists the names
from .distributed.scheme import DistributedWeightSyncScheme
from .distributed.transport import DistributedTransport
from .ray.module import (
    RayActorTransport,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
)
from .ray.scheme import RayTransport, RayWeightSyncScheme
from .ray.updater import RayWeightUpdater, WeightUpdaterBase
from .rpc import RPCTransport, RPCWeightSyncScheme
