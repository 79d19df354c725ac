"""The options and the collector of a ShmWeightSyncScheme, checked before anything is made."""

from __future__ import annotations

from typing import Any

from ....engine.source.dtypes import Dtypes, check_dtypes
from ....errors import ProtocolError
from ....schemes.devices import DeviceChoice, WorkerDevices

NOT_DISTRIBUTED = (
    "ShmWeightSyncScheme shares memory with the processes that Collector, MultiSyncCollector and MultiAsyncCollector "
    "start; a {} takes RayWeightSyncScheme(), RPCWeightSyncScheme() or DistributedWeightSyncScheme() of "
    "torchrl.weight_update"
)


def checked_devices(device: DeviceChoice, *, strict: bool, dtype: Dtypes) -> WorkerDevices:
    """The workers' devices. Raises TypeError and ValueError for options that are wrong."""
    if not isinstance(strict, bool):
        raise TypeError(f"strict is True or False, not {strict!r}")
    check_dtypes(dtype)
    return WorkerDevices(device)


def check_not_distributed(collector: Any) -> None:
    """Raise ProtocolError for a collector over Ray, RPC or torch.distributed."""
    if any(kind.__module__.startswith("torchrl.collectors.distributed") for kind in type(collector).__mro__):
        raise ProtocolError(NOT_DISTRIBUTED.format(type(collector).__name__))
