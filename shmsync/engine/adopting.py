"""Adoption: a module's parameters become the slab itself."""

from __future__ import annotations

import torch
from torch import nn

from .. import _native
from ..errors import ManifestMismatch
from ..memory.arena import Arena
from .sources import Filter, collect


def check(module: nn.Module, arena: Arena, filter: Filter, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise if adopting would change the module's dtypes, or if the optimizer is another module's."""
    tensors = collect(module, filter).tensors
    cast = [
        f"{leaf.name} is {leaf.dtype} in the arena but {tensors[leaf.key].dtype} in the module"
        for leaf in arena.manifest.leaves
        if tensors[leaf.key].dtype != leaf.dtype
    ]
    if cast:
        raise ManifestMismatch(
            "adopt() would cast the trainer's own parameters: " + "; ".join(cast) + ". Make the Publisher without "
            "dtype=, or use publish() instead"
        )
    if optimizer is not None:
        own = {id(tensor) for tensor in tensors.values()}
        stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if not any(id(tensor) in own for tensor in stepped):
            raise ValueError(
                f"the optimizer steps {len(stepped)} parameter(s), none of them of the module to adopt; pass the "
                "optimizer of this module"
            )


class Adoption:
    """The module whose parameters are views of the slab."""

    def __init__(self, module: nn.Module, arena: Arena, filter: Filter) -> None:
        views = arena.views(0, writable=True)
        tensors = collect(module, filter).tensors
        self._placed_parameters = [(t, views[key]) for key, t in tensors.items() if isinstance(t, nn.Parameter)]
        # Forward passes write buffers (BatchNorm), outside any update(): they stay private and are copied at its end.
        self._private_buffers = [(t, views[key]) for key, t in tensors.items() if not isinstance(t, nn.Parameter)]
        for parameter, view in self._placed_parameters:
            parameter.data = view
        self._placed = _native.Sources([], [(t, 0, 0) for t, _ in self._placed_parameters])

    def take_back(self) -> int:
        """Inside update(): `.data = x`, `.half().float()` and the like moved parameters out of the slab; their values
        go in again. The bytes copied."""
        if self._placed.revalidate() and not self._placed.moved:
            return 0
        away = [(t, view) for t, view in self._placed_parameters if t.data_ptr() != view.data_ptr()]
        wrong = [t for t, view in away if t.shape != view.shape or t.dtype != view.dtype or t.device != view.device]
        if wrong:
            raise ManifestMismatch(
                f"{len(wrong)} adopted parameter(s) were replaced by ones of another shape, dtype or device, such as "
                f"{tuple(wrong[0].shape)} {wrong[0].dtype} on {wrong[0].device}; change the module back, or make a new "
                "Publisher for it"
            )
        with torch.no_grad():
            for parameter, view in away:
                view.copy_(parameter)
                parameter.data = view
        self._placed = _native.Sources([], [(t, 0, 0) for t, _ in self._placed_parameters])
        return sum(view.nbytes for _, view in away)

    def copy_buffers(self) -> int:
        """Bring the slab's copies of the buffers up to date; the bytes copied."""
        with torch.no_grad():
            for buffer, view in self._private_buffers:
                view.copy_(buffer)
        return sum(view.nbytes for _, view in self._private_buffers)

    def give_back(self) -> None:
        """Make the parameters private again, with the values they have."""
        for parameter, view in self._placed_parameters:
            if parameter.data_ptr() == view.data_ptr():
                parameter.data = view.clone()
