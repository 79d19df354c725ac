"""The schemes for several machines. Importing them needs none of the packages that they stand on."""

from ._distributed import DistributedTransport
from ._distributed_scheme import DistributedWeightSyncScheme
from ._ray import RayTransport, RayWeightSyncScheme
from ._ray_module import (
    RayActorTransport,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
)
from ._rpc import RPCTransport, RPCWeightSyncScheme
from ._updaters import RayWeightUpdater, WeightUpdaterBase

__all__ = [
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "WeightUpdaterBase",
]
