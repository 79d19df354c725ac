"""Adoption: a module's parameters become the slab itself, and its optimizer steps inside update()."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._weights import Filter, collect
from .arena import Arena

if TYPE_CHECKING:
    from .publisher import Publisher


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN, unlike with torch.equal."""
    if a.numel() == 0:
        return True
    a, b = (t.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


class Adoption:
    """The module whose parameters are views of the slab."""

    def __init__(self, module: nn.Module, arena: Arena, filter: Filter) -> None:
        views = arena.views(0, writable=True)
        tensors = collect(module, filter).tensors
        self._parameters = [(t, views[key]) for key, t in tensors.items() if isinstance(t, nn.Parameter)]
        # Forward passes write buffers (BatchNorm), outside any update(): they stay private and are copied at entry.
        self._buffers = [(t, views[key]) for key, t in tensors.items() if not isinstance(t, nn.Parameter)]
        for parameter, view in self._parameters:
            parameter.data = view

    def copy_buffers(self) -> int:
        """Bring the slab's copies of the buffers up to date; the bytes copied."""
        with torch.no_grad():
            for buffer, view in self._buffers:
                view.copy_(buffer)
        return sum(view.nbytes for _, view in self._buffers)

    def give_back(self) -> None:
        """Make the parameters private again, with the values they have."""
        for parameter, view in self._parameters:
            if parameter.data_ptr() == view.data_ptr():
                parameter.data = view.clone()


def step_inside_update(optimizer: torch.optim.Optimizer, publisher: Publisher) -> None:
    """From now on optimizer.step() opens an update() section, unless its thread is in one already."""
    step = optimizer.step

    def step_in_update(*args: Any, **kwargs: Any) -> Any:
        if publisher._closed or publisher._side.updating_thread == threading.get_ident():
            return step(*args, **kwargs)
        with publisher.update():
            return step(*args, **kwargs)

    step_in_update._wrapped_by_lr_sched = getattr(step, "_wrapped_by_lr_sched", False)  # type: ignore[attr-defined]
    optimizer.step = step_in_update  # type: ignore[method-assign]
