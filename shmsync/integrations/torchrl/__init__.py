"""shmsync as a weight-sync scheme of TorchRL's collectors: `weight_sync_schemes={"policy": ShmWeightSyncScheme()}`."""

try:
    import torchrl.weight_update as _torchrl
except ImportError as error:
    raise ImportError(f"this needs TorchRL ({error}): pip install 'shmsync[torchrl]'") from error

from .torchrl_scheme import ShmWeightSyncScheme

__all__ = ["ShmWeightSyncScheme"]

_register = getattr(_torchrl.weight_sync_schemes, "register_weight_sync_backend", None)
if _register is not None:  # TorchRL 0.14 and later: WeightSyncScheme.from_backend("shmsync")
    _register("shmsync")(ShmWeightSyncScheme)
