"""Where the weights of a scheme lie: in one place for all workers, or for each worker where its module is.

Devices are checked where a scheme is made, and only their names travel: a worker may see others than the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..memory.devices import named

HOST = "cpu"
DeviceChoice = torch.device | str | Sequence[torch.device | str | None] | None


def device_names(given: DeviceChoice, workers: int | None = None) -> list[str | None]:
    """The device of each worker by name; None where nothing was said.

    Args:
        given: None, one device for all workers, or a list or tuple with one for each worker, where None is the host's.
        workers: how many there are; None: that is not known yet, and what is given is checked.

    Raises:
        TypeError, ValueError: what is given is no device on which weights can lie, or is for another number of workers.
        DeviceFailed: a GPU that is not there.
        ForkedHandle: a GPU, in a child of a process that uses CUDA.
    """
    if given is None or isinstance(given, (str, torch.device)):
        return [None if given is None else _name(given)] * (1 if workers is None else workers)
    if not isinstance(given, (list, tuple)):
        raise TypeError(
            "device is one device for all workers, such as 'cuda:0', or a list with one for each worker, not "
            f"{given!r} ({type(given).__name__})"
        )
    names: list[str | None] = [HOST if each is None else _name(each) for each in given]
    if workers not in (None, len(names)):
        raise ValueError(
            f"device={names} is for {len(names)} workers, but there are {workers}; list one for each worker, None for "
            "the host's memory, or give one device for all"
        )
    return names


def lies_elsewhere(model: nn.Module, device: torch.device) -> bool:
    """Has the model tensors on another device than the arena, whose memory it then cannot use itself?"""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"}
    return not devices <= {device}


def _name(given: torch.device | str) -> str:
    device = named(given)
    return HOST if device is None else device.name
