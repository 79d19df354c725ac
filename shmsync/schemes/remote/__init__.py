"""The schemes for several machines. Importing them needs none of the packages that they stand on.

A scheme for another network derives from the classes in remote_scheme.py, remote_carrier.py, remote_transport.py and
remote_requests.py.
"""

# "X as X" says that X is meant for others: schemes/__init__ shows it
from .distributed.distributed_scheme import DistributedTransport as DistributedTransport
from .distributed.distributed_scheme import DistributedWeightSyncScheme as DistributedWeightSyncScheme
from .ray.ray_scheme import RayActorTransport as RayActorTransport
from .ray.ray_scheme import RayModuleTransformReceiver as RayModuleTransformReceiver
from .ray.ray_scheme import RayModuleTransformScheme as RayModuleTransformScheme
from .ray.ray_scheme import RayModuleTransformSender as RayModuleTransformSender
from .ray.ray_scheme import RayTransport as RayTransport
from .ray.ray_scheme import RayWeightSyncScheme as RayWeightSyncScheme
from .ray.ray_updater import RayWeightUpdater as RayWeightUpdater
from .ray.ray_updater import WeightUpdaterBase as WeightUpdaterBase
from .rpc.rpc_scheme import RPCTransport as RPCTransport
from .rpc.rpc_scheme import RPCWeightSyncScheme as RPCWeightSyncScheme
