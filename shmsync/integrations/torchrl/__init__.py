"""The weight-sync scheme of TorchRL's collectors over shmsync: only the import changes.

`weight_sync_schemes={"policy": SharedMemWeightSyncScheme()}`. It is another class than that of `shmsync` itself, which
serves workers of your own. ShmWeightSyncScheme is its other name.
"""

try:
    import torchrl.weight_update as _torchrl
except ImportError as error:
    raise ImportError(f"this needs TorchRL ({error}): pip install 'shmsync[torchrl]'") from error

from .scheme import ShmWeightSyncScheme

SharedMemWeightSyncScheme = ShmWeightSyncScheme

__all__ = ["SharedMemWeightSyncScheme", "ShmWeightSyncScheme"]

_register = getattr(_torchrl.weight_sync_schemes, "register_weight_sync_backend", None)
if _register is not None:  # TorchRL 0.14 and later: WeightSyncScheme.from_backend("shmsync")
    _register("shmsync")(ShmWeightSyncScheme)
