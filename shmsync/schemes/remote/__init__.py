"""Schemes for workers beyond this machine, over Ray, torch RPC and torch.distributed. No network of our own.

base.py, packing.py and receiver.py are what they share; nodes.py is fan_out="node". A module here imports its engine
when it is first used.
May be imported by schemes/__init__ alone.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from .distributed import DistributedTransport as DistributedTransport
    from .distributed import DistributedWeightSyncScheme as DistributedWeightSyncScheme
    from .ray import RayActorTransport as RayActorTransport
    from .ray import RayModuleTransformReceiver as RayModuleTransformReceiver
    from .ray import RayModuleTransformScheme as RayModuleTransformScheme
    from .ray import RayModuleTransformSender as RayModuleTransformSender
    from .ray import RayTransport as RayTransport
    from .ray import RayWeightSyncScheme as RayWeightSyncScheme
    from .rpc import RPCTransport as RPCTransport
    from .rpc import RPCWeightSyncScheme as RPCWeightSyncScheme
    from .updater import RayWeightUpdater as RayWeightUpdater
    from .updater import WeightUpdaterBase as WeightUpdaterBase
