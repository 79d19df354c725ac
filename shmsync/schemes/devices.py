"""Where the weights of a scheme lie: in one place for all workers, or for each worker where its module is.

Devices are checked where a scheme is made, and only their names travel: a worker may see others than the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import ShmSyncError
from ..memory.devices import named

HOST = "cpu"
DeviceChoice = torch.device | str | Sequence[torch.device | str | None] | None


class WorkerDevices:
    """The device of each worker, by name.

    Args:
        given: None, one device for all workers, or a list or tuple with one for each worker, where None is the host's.

    Raises:
        TypeError, ValueError: what is given is no device on which weights can lie.
        DeviceFailed: a GPU that is not there.
        ForkedHandle: a GPU, in a child of a process that uses CUDA.
    """

    def __init__(self, given: DeviceChoice) -> None:
        self._all: str | None = None
        self._each: tuple[str, ...] | None = None
        if given is None:
            return
        if isinstance(given, (str, torch.device)):
            self._all = _name(given)
        elif isinstance(given, (list, tuple)):
            self._each = tuple(HOST if each is None else _name(each) for each in given)
        else:
            raise TypeError(
                "device is one device for all workers, such as 'cuda:0', or a list with one for each worker, not "
                f"{given!r} ({type(given).__name__})"
            )

    @property
    def unset(self) -> bool:
        """Was nothing said?"""
        return self._all is None and self._each is None

    @property
    def distinct(self) -> list[str]:
        """The names of all given devices, each once."""
        return [self._all] if self._all is not None else list(dict.fromkeys(self._each or ()))

    def of(self, worker: int) -> str | None:
        """The device of one worker; None: nothing was said. Raises ValueError for a worker that has none."""
        if self._each is None:
            return self._all
        if not 0 <= worker < len(self._each):
            raise ValueError(
                f"worker {worker} has no device: device={list(self._each)} lists those of {len(self._each)} workers, "
                "0 and up; list one for each worker, None for the host's memory, or give one device for all"
            )
        return self._each[worker]

    def check_workers(self, count: int) -> None:
        """Raise ValueError when these are devices of another number of workers."""
        if self._each is not None and count != len(self._each):
            raise ValueError(
                f"device={list(self._each)} is for {len(self._each)} workers, but there are {count}; list one for each "
                "worker, None for the host's memory, or give one device for all"
            )


def device_of_arena(policy_device: torch.device | str | int) -> str:
    """Where the arena lies of a worker whose module is there: on that device, or in the host's memory if it cannot."""
    wanted = torch.device("cuda", policy_device) if isinstance(policy_device, int) else policy_device
    try:
        return _name(wanted)
    except (ShmSyncError, ValueError, TypeError, ImportError):
        return HOST


def lies_elsewhere(model: nn.Module, device: torch.device) -> bool:
    """Has the model tensors on another device than the arena, whose memory it then cannot use itself?"""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"}
    return not devices <= {device}


def _name(given: torch.device | str) -> str:
    device = named(given)
    return HOST if device is None else device.name
