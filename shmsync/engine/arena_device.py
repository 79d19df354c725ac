"""Where an arena lies: in the host's memory, on the device that was asked for, or where its weights are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..errors import ManifestMismatch
from ..memory import devices
from ..memory.devices import Device
from ..memory.manifest import Key

SAME = "same"  # where the weights are


class ArenaPlace(NamedTuple):
    """Where an arena lies, and whether its sources may lie elsewhere."""

    device: Device | None  # None: the host's memory
    any_device: bool


def place_for(tensors: Mapping[Key, Any], device: torch.device | str | None) -> ArenaPlace:
    """Where an arena for these tensors lies. `device`: as in Publisher; wrong ones are TypeError and ValueError.

    Raises ManifestMismatch for "same" when the tensors lie in several places, or where no arena can lie.
    """
    if device is None:
        return ArenaPlace(devices.default(), True)
    if device != SAME:
        return ArenaPlace(devices.named(device), True)
    places: dict[str, list[str]] = {}
    for key, tensor in tensors.items():
        if tensor.numel():  # an empty one is nowhere
            places.setdefault(str(tensor.device), []).append(".".join(key))
    if not places or list(places) == ["cpu"]:
        default = devices.default()
        return ArenaPlace(default, default is not None)
    if len(places) > 1:
        lying = "; ".join(f"{len(names)} on {place}, such as {names[0]}" for place, names in places.items())
        raise ManifestMismatch(
            f"these weights lie in {len(places)} places ({lying}), so device='same' names none; name one, as in "
            f"device={next(iter(places))!r}"
        )
    ((place, names),) = places.items()
    try:
        return ArenaPlace(devices.named(place), False)
    except ValueError as error:
        raise ManifestMismatch(f"{names[0]} lies on {place}: {error}") from error
