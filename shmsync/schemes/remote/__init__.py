"""The schemes for several machines. Importing them needs none of the packages that they stand on.

What another one is made of is in carrier, requests, transport and scheme: see docs/add-a-transport.md.
"""

# "X as X" says that X is meant for others: schemes/__init__ shows it
from .distributed.scheme import DistributedWeightSyncScheme as DistributedWeightSyncScheme
from .distributed.transport import DistributedTransport as DistributedTransport
from .ray.module import RayActorTransport as RayActorTransport
from .ray.module import RayModuleTransformReceiver as RayModuleTransformReceiver
from .ray.module import RayModuleTransformScheme as RayModuleTransformScheme
from .ray.module import RayModuleTransformSender as RayModuleTransformSender
from .ray.scheme import RayTransport as RayTransport
from .ray.scheme import RayWeightSyncScheme as RayWeightSyncScheme
from .ray.updater import RayWeightUpdater as RayWeightUpdater
from .ray.updater import WeightUpdaterBase as WeightUpdaterBase
from .rpc import RPCTransport as RPCTransport
from .rpc import RPCWeightSyncScheme as RPCWeightSyncScheme
