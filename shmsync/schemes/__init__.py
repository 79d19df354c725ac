"""Weight-sync schemes: who sends which model to whom, and when it is applied. The shape is TorchRL's API."""

from ..strategy import WeightStrategy
from ._base import TransportBackend, WeightSyncScheme
from ._mp import MPTransport, MultiProcessWeightSyncScheme
from ._none import NoWeightSyncScheme
from ._receiver import WeightReceiver
from ._sender import WeightSender
from ._shared import SharedMemWeightSyncScheme
from ._shared_transport import SharedMemTransport
from ._together import send_together

__all__ = [
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncScheme",
    "send_together",
]
