"""The methods of a bound module that are replaced besides its calls.

A conversion or a load would take bound tensors out of the arena, or write into its read-only memory: a typed error, at
once. A deepcopy is made in one section, so it has the weights of one version, as its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

import torch
from torch import nn

from ...errors import ProtocolError
from ...memory.devices import has_address
from ...memory.torch_modes import plainly, run_plainly
from ..source.wrappers import modules_in
from .binding import bound_tensors, bound_to, own_tensors
from .guard import Proxy
from .module_check import placed_modules

Conversion = Callable[[torch.Tensor], torch.Tensor]

_SOME = 5  # dimensions up to which a tensor to try a conversion on has more than one element


def replace_methods(module: nn.Module) -> None:
    """Replace these methods of the module and of its submodules, if they are not replaced yet."""
    modules = list(modules_in(module))
    for child, name in unguarded_loads(modules):
        Loading(child, name)
    for child in modules:
        if not isinstance(child.__dict__.get("_apply"), Proxy):
            Converting(child, "_apply")
        child.__dict__["__deepcopy__"] = Copying(child)


# ---- conversions


class Converting(Proxy):
    """Replaces `_apply()`, and so to(), half(), double(), cuda() and the like."""

    def __call__(self, fn: Conversion, *args: Any, **kwargs: Any) -> Any:
        """Convert, or raise ProtocolError before anything changes."""
        shown = bound_tensors(self.module)
        if shown:
            _refuse_to_convert(self.module, shown, fn)
        return self.inner(fn, *args, **kwargs)


def _refuse_to_convert(module: nn.Module, shown: set[int], fn: Conversion) -> None:
    """Try the conversion on other tensors of the same kinds. Raises ProtocolError if it would replace or write one."""
    tried = set()
    for key, tensor in own_tensors(placed_modules(module)):
        kind = (tensor.dtype, tensor.device, tensor.dim())
        if id(tensor) not in shown or kind in tried:
            continue
        tried.add(kind)
        with plainly():
            sizes = (2 if tensor.dim() <= _SOME else 1,) * tensor.dim()
            like = torch.ones(sizes, dtype=tensor.dtype, device=tensor.device)
        before = _place(like)
        with torch.no_grad():
            made = fn(like)
        if isinstance(made, torch.Tensor) and _place(made) == _place(like) == before and _all_ones(like):
            continue
        what = f"{made.dtype} on {made.device}" if isinstance(made, torch.Tensor) else f"a {type(made).__name__}"
        raise ProtocolError(
            f"this would take {len(shown)} tensor(s) of a bound module out of the arena, such as {'.'.join(key)}: "
            f"{tensor.dtype} on {tensor.device} would become {what}. Nothing was changed. For weights of another dtype "
            "use Publisher(dtype=) and convert the worker's module before bind(); another device is for before bind() "
            "too; or convert copy.deepcopy(module)"
        )


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    address = tensor.data_ptr() if has_address(tensor) else None
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), address


@run_plainly
def _all_ones(tensor: torch.Tensor) -> bool:
    return bool(tensor.eq(1).all())


# ---- loads: the methods under which stand the proxies of bound and of adopted modules


def unguarded_loads(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """The methods of these modules that load weights and are not replaced by a proxy yet."""
    for child in modules:
        own = child.__dict__
        for name in ("load_state_dict", "_load_from_state_dict"):
            if name in own:
                if not isinstance(own[name], Proxy):
                    yield child, name
            elif hasattr(child, name):
                yield child, name


def would_be_written(
    state_dict: Mapping[str, Any], prefix: str, named: Iterable[tuple[str, torch.Tensor | None]], shown: set[int]
) -> list[str]:
    """The keys of a state_dict() that belong to those of the named tensors whose ids are among these."""
    return sorted({prefix + name for name, tensor in named if id(tensor) in shown and prefix + name in state_dict})


class Loading(Proxy):
    """Replaces `load_state_dict()` of a module, or the part of it that writes the module's own tensors."""

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what does not lie in an arena; raise ProtocolError for the rest."""
        module, prefix = self.module, args[0] if self.method == "_load_from_state_dict" else ""
        shown = bound_tensors(module)
        if not shown:
            return self.inner(state_dict, *args, **kwargs)
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        if refused := would_be_written(state_dict, prefix, named, shown):
            raise ProtocolError(
                f"load_state_dict() would write {len(refused)} tensor(s) of a bound module, such as "
                f"{refused[0]}: they show the arena, which is read-only here. Load into the trainer's module "
                "and publish it, or load into copy.deepcopy(module)"
            )
        return self.inner(state_dict, *args, **kwargs)


# ---- copies


class Copying:
    """Stands as `__deepcopy__` of one module: the copy is private, and of one version."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, memo: dict[int, Any]) -> Any:
        """As copy.deepcopy() calls it."""
        readers = [path for each in bound_to(self._module) if (path := each.path()) is not None and not path.in_parent]
        return readers[0].pinned(self._copied, memo)[0] if readers else self._copied(memo)

    def _copied(self, memo: dict[int, Any]) -> Any:
        module = self._module
        own = getattr(type(module), "__deepcopy__", None)
        if own is not None:
            made = own(module, memo)
        else:
            reduced: Any = module.__reduce_ex__(4)
            made = module if isinstance(reduced, str) else copy._reconstruct(module, memo, *reduced)  # type: ignore[attr-defined]
        made.__dict__.pop("__deepcopy__", None)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module has nothing in this place."""

    def __reduce__(self) -> Any:
        return NoneType, ()
