"""The options and the collector of a ShmWeightSyncScheme, checked before anything is made."""

from __future__ import annotations

from typing import Any

from ....engine.source.dtypes import Dtypes, check_dtypes
from ....errors import ProtocolError
from ....schemes.arenas.worker_devices import DeviceChoice, WorkerDevices

NOT_DISTRIBUTED = (
    "ShmWeightSyncScheme shares memory with the processes that Collector, MultiSyncCollector and MultiAsyncCollector "
    "start; a {} takes RayWeightSyncScheme(), RPCWeightSyncScheme() or DistributedWeightSyncScheme() of "
    "torchrl.weight_update"
)


def checked_devices(
    device: DeviceChoice, *, strict: bool, dtype: Dtypes, alias: bool, slots: int, apart: bool
) -> WorkerDevices:
    """The workers' devices. `apart`: per_worker_weights; the others are options of the same name.

    Raises TypeError and ValueError for options that are wrong, or that exclude each other.
    """
    if not isinstance(strict, bool):
        raise TypeError(f"strict is True or False, not {strict!r}")
    check_dtypes(dtype)
    if alias and dtype is not None:
        raise ValueError(
            f"alias=True shares the trainer's own parameters as they are, but dtype={dtype} would cast them; give "
            "one of the two"
        )
    if alias and (slots != 1 or apart):
        raise ValueError(
            f"alias=True is one storage for all workers: it needs slots=1 and no per_worker_weights, but "
            f"slots={slots} and per_worker_weights={apart}"
        )
    devices = WorkerDevices(device)
    if alias and not devices.unset:
        raise ValueError(
            f"alias=True shares the trainer's own parameters where they are, but device={devices} says where "
            "weights are copied to; give one of the two"
        )
    return devices


def check_not_distributed(collector: Any) -> None:
    """Raise ProtocolError for a collector over Ray, RPC or torch.distributed."""
    if any(kind.__module__.startswith("torchrl.collectors.distributed") for kind in type(collector).__mro__):
        raise ProtocolError(NOT_DISTRIBUTED.format(type(collector).__name__))
