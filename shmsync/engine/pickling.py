"""What torch.multiprocessing does with a tensor that lies in an arena: the other process gets a private copy.

Torch would move all of the slab into new shared memory, in this process too, and so take every view out of the arena.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn

from .. import _native
from ..memory.arena import arena_around
from ..memory.devices import has_address
from ..memory.torch_modes import plainly


@functools.cache
def copy_by_value() -> None:
    """From now on, queues and pipes of this process take private copies of arenas' tensors."""
    for kind in (torch.Tensor, nn.Parameter):
        usual = ForkingPickler._extra_reducers[kind]  # type: ignore[attr-defined]
        ForkingPickler.register(kind, functools.partial(_reduced, reduce=usual))


def _reduced(tensor: torch.Tensor, reduce: Callable[[Any], Any]) -> Any:
    if not _lies_in_an_arena(tensor):
        return reduce(tensor)
    with plainly():
        made = tensor.detach().clone()
    made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    popen = get_spawning_popen()
    if popen is not None:  # the number of the copy's descriptor is passed on when all arguments are pickled
        vars(popen).setdefault("_shmsync_copies", []).append(made)
    return reduce(made)


def _lies_in_an_arena(tensor: torch.Tensor) -> bool:
    """Or in a private copy that a Subscriber renews; in one that was closed here, too."""
    if tensor.layout is not torch.strided or not has_address(tensor) or tensor.is_nested:
        return False
    address = tensor.untyped_storage().data_ptr()
    return arena_around(tensor, address) is not None or _native.is_watched(address)
