"""The schemes for several machines. Importing them needs none of the packages that they stand on.

The second group is what another one is made of: see docs/add-a-transport.md.
"""

from ...engine.outcome import Failure
from ..lookup import Arguments
from .background import Clerk, Task
from .carrier import Carrier, HostedRelay
from .distributed.scheme import DistributedWeightSyncScheme
from .distributed.transport import DistributedTransport
from .parcel import Announcement, Parcel
from .place import Place, Site, here
from .ray.module import (
    RayActorTransport,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
)
from .ray.scheme import RayTransport, RayWeightSyncScheme
from .ray.updater import RayWeightUpdater, WeightUpdaterBase
from .receiver import RemoteReceiver
from .relay import RelayOptions, close_here, publish_here
from .requests import Answered, Call, Destination, Failed, Gone
from .roster import Roster
from .rpc import RPCTransport, RPCWeightSyncScheme
from .scheme import RemoteScheme
from .transport import RemoteTransport

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
__all__ += [
    "Announcement",
    "Answered",
    "Arguments",
    "Call",
    "Carrier",
    "Clerk",
    "Destination",
    "Failed",
    "Failure",
    "Gone",
    "HostedRelay",
    "Parcel",
    "Place",
    "RelayOptions",
    "RemoteReceiver",
    "RemoteScheme",
    "RemoteTransport",
    "Roster",
    "Site",
    "Task",
    "close_here",
    "here",
    "publish_here",
]
