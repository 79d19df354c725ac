"""What would take a bound module's tensors out of the arena, or make another module of them: a typed error, at once.

The parameters of a bound module move with the version, and its sections cover its own calls alone. So a trace, an
export or a shallow copy of it would compute with weights that change, unprotected. Only copy.deepcopy() makes a module
with weights of its own memory; it runs in one section.

Each name below is one that torch, or Python's copying, looks up on the module when it begins such a thing; or one
under which weights are loaded into the module, whose memory is read-only.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import nn

from ...errors import ProtocolError
from ...memory.devices import has_address
from ...memory.manifest import Key
from ...memory.torch_modes import plainly, run_plainly
from ..source.wrappers import walk
from .binding import bound_tensors, companions, own_tensors
from .guard import Proxy
from .read_guard import Sections, shares, traced_by

Conversion = Callable[[torch.Tensor], torch.Tensor]

_SOME = 5  # dimensions up to which a tensor to try a conversion on has more than one element


def watch(module: nn.Module) -> None:
    """Refuse from now on, as long as it or a submodule is bound, what this file is about."""
    attributes = module.__dict__
    for function in _HOOKS:
        if function.__name__ not in attributes:
            attributes[function.__name__] = MethodType(function, module)
    attributes.setdefault(_IGNORED, Refusal(module))


def refuse_to_share(module: nn.Module, tool: str) -> None:
    """Raise ProtocolError if the module has bound tensors, or a submodule has."""
    shown = _shown(module)
    if shown:
        first = next(iter(shown.values()))
        raise ProtocolError(shares(tool, f"{len(shown)} tensor(s) of a bound module, such as {first}"))


def _shown(module: nn.Module) -> dict[int, str]:
    """The ids and names of the bound tensors of the module and of its submodules."""
    mine = bound_tensors(module)
    return {id(tensor): ".".join(key) for key, tensor in _tensors(module) if id(tensor) in mine}


def _tensors(module: nn.Module) -> Iterator[tuple[Key, torch.Tensor]]:
    return own_tensors((place.path, place.module) for place in walk(module))  # not named_modules(), which is watched


# ---- the entries of a module's own dict, under the same names


def _apply(self: nn.Module, fn: Conversion, *args: Any, **kwargs: Any) -> nn.Module:
    """to(), half(), double(), cuda(), share_memory() and the like, tried on other tensors of the same kinds first."""
    if not isinstance(fn, Tried):
        shown = _shown(self)
        if shown:
            _try(self, shown, fn)
        fn = Tried(fn)
    return type(self)._apply(self, fn, *args, **kwargs)


class Tried(partial[torch.Tensor]):
    """A conversion that all bound tensors below a module outlive as they are."""


def _try(module: nn.Module, shown: dict[int, str], fn: Conversion) -> None:
    """Raise ProtocolError if the conversion gives a tensor like one of these other memory, or writes into it."""
    tried = set()
    for key, tensor in _tensors(module):
        kind = (tensor.dtype, tensor.device, tensor.dim())
        if id(tensor) in shown and kind not in tried:
            tried.add(kind)
            with plainly():
                sizes = (2 if tensor.dim() <= _SOME else 1,) * tensor.dim()
                like = torch.ones(sizes, dtype=tensor.dtype, device=tensor.device)
            before = _place(like)
            with torch.no_grad():
                made = fn(like)
            if isinstance(made, torch.Tensor) and _place(made) == _place(like) == before and _all_ones(like):
                continue
            raise ProtocolError(
                f"this would take {len(shown)} tensor(s) of a bound module out of the arena, such as "
                f"{'.'.join(key)}: {_what(tensor)} would become {_what(made)}. Nothing was changed. For weights of "
                "another dtype use Publisher(dtype=) and convert the worker's module before bind(); another device is "
                "for before bind() too; or convert copy.deepcopy(module)"
            )


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = (tensor.data_ptr(), tensor.is_shared()) if has_address(tensor) else None
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), where


@run_plainly
def _all_ones(tensor: torch.Tensor) -> bool:
    return bool(tensor.eq(1).all())


def _what(tensor: Any) -> str:
    return f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"


def _slow_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward, while torch.jit traces; torch.onnx's older exporter uses that too."""
    refuse_to_share(self, "torch.jit.trace()")
    return type(self)._slow_forward(self, *args, **kwargs)


def named_modules(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What torch.fx and torch.export ask for first, and parameters() for that matter."""
    if not torch.compiler.is_dynamo_compiling() and (tool := traced_by()) is not None:
        refuse_to_share(self, tool)
    return type(self).named_modules(self, *args, **kwargs)


def _replicate_for_data_parallel(self: nn.Module) -> Any:
    refuse_to_share(self, "DataParallel")
    return type(self)._replicate_for_data_parallel(self)


def __prepare_scriptable__(self: nn.Module) -> Any:  # torch's own name
    refuse_to_share(self, "torch.jit.script()")
    prepare = getattr(type(self), "__prepare_scriptable__", None)
    return self if prepare is None else prepare(self)


def __getstate__(self: nn.Module) -> Any:
    """What a copy or a pickle of the module is made of, without the proxies of this file."""
    if sys._getframe(1).f_code is copy.copy.__code__:
        refuse_to_share(self, "copy.copy()")
    own = getattr(type(self), "__getstate__", None)
    if own is not None:
        state = own(self)
    else:  # before Python 3.11
        hook = self.__dict__.pop("__getstate__")
        try:
            state = object.__reduce_ex__(self, 2)[2]
        finally:
            self.__dict__["__getstate__"] = hook
    if isinstance(state, tuple) and state:  # the class has __slots__
        return (_without_hooks(state[0]), *state[1:])
    return _without_hooks(state)


def _without_hooks(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if not _is_hook(value)}


def _is_hook(value: Any) -> bool:
    return isinstance(value, Refusal) or (isinstance(value, MethodType) and value.__func__ in _HOOKS)


def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> Any:
    """A copy of one version, made in one section."""
    paths = {path for each in companions(self) if (path := each.path()) is not None}
    readable = {path for path in paths if not (path.closed or path.in_parent or path.in_section)}
    with Sections(sorted(readable, key=attrgetter("number"))):
        own = getattr(type(self), "__deepcopy__", None)
        if own is not None:
            return own(self, memo)
        reduced = self.__reduce_ex__(4)
        return self if isinstance(reduced, str) else copy._reconstruct(self, memo, *reduced)  # type: ignore[attr-defined]


class Refusal:
    """Stands where torch looks for something else of a module, and raises as long as the module is bound."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __iter__(self) -> Iterator[str]:
        """DistributedDataParallel asks which tensors to leave alone, before it writes into the others."""
        refuse_to_share(self._module, "DistributedDataParallel, which writes into the weights that it is given,")
        return iter(())

    @property
    def _torchscript_modifier(self) -> Any:
        """torch.jit.trace_module() asks every callable whether it is to be exported."""
        refuse_to_share(self._module, "torch.jit")
        raise AttributeError

    def __call__(self) -> None:
        """Nothing: only what can be called is asked."""


_IGNORED = "_ddp_params_and_buffers_to_ignore"
_HOOKS: dict[Callable[..., Any], None] = dict.fromkeys(
    (_apply, _slow_forward, named_modules, _replicate_for_data_parallel, __prepare_scriptable__, __getstate__,
     __deepcopy__)
)  # fmt: skip


# ---- the load methods, under which stand the proxies of bound and of adopted modules


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
