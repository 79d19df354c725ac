"""What an output reaches, and a copy of it in which nothing lies in an arena.

What an object refers to is what the garbage collector sees of it: no property, iterator or method of the user's runs.
Containers, attributes and slots can be copied; where anything else holds memory of an arena, it is refused.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import gc
import operator
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ...errors import ProtocolError
from ...memory.dynamo import skip
from ..source.leaf_check import is_tensordict, loaded_class

Test = Callable[[Any], bool]

_MOST = 20_000  # objects of other kinds than tensors and containers
_CURE = (
    "return tensors, or clone() what it keeps; or take no copies, with bind(clone_outputs=False), and use it inside "
    "`with sub.read():`"
)


class Plain:
    """The kind of what holds no tensor, or stays as it is: a module, a handle of ours."""


class TensorDictLike:
    """The kind of TensorDicts and tensorclasses."""


class Opaque:
    """The kind of what can be looked into, and not copied."""


_CAPSULE = type(torch.zeros(0, device="cpu").__dlpack__())
_CONTAINERS = {OrderedDict, defaultdict, dict, list, deque, set, tuple, frozenset}
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_WHOLE = {Tensor, TensorDictLike, numpy.ndarray, memoryview, _CAPSULE, *_STORAGES}
_FILLED = _CONTAINERS - {tuple, frozenset} | {object, types.SimpleNamespace}
_EXACTLY_PLAIN = {
    type(None), bool, int, float, complex, str, bytes, bytearray, range, type(...), types.CodeType, types.FrameType,
    types.TracebackType, types.ModuleType, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Generator,
}  # fmt: skip
_PLAIN_BASES = (nn.Module, type, types.ModuleType, torch.Size, numpy.generic, enum.Enum)
_EXACT = {
    memoryview, types.MappingProxyType, functools.partial, types.MethodType, types.FunctionType, weakref.ref, _CAPSULE,
}  # fmt: skip
_BASES = (Tensor, numpy.ndarray, *_STORAGES, OrderedDict, defaultdict, dict, list, deque, set, tuple, frozenset)
_HEAP = 1 << 9  # in the flags of a type: it was made by a class statement

_DEFAULT_FACTORY: Any = vars(defaultdict)["default_factory"]
_MAXLEN: Any = vars(deque)["maxlen"]

indices_of = operator.methodcaller("_indices")  # of a sparse tensor that may not be coalesced
values_of = operator.methodcaller("_values")


@functools.lru_cache(2000)
@skip
def _kind_of(cls: type) -> type:
    """The kind of a type: that one of the types above as which its objects are looked into and copied."""
    mro = cls.__mro__
    if cls in _EXACTLY_PLAIN or any(base in mro for base in _PLAIN_BASES):
        return Plain
    if any(base.__module__.partition(".")[0] == "shmsync" for base in mro):
        return Plain
    if "tensordict" in sys.modules:  # else there is no object of its classes
        from tensordict import TensorDictBase, is_tensorclass

        if TensorDictBase in mro or is_tensorclass(cls):
            return TensorDictLike
    if cls in _EXACT:
        return cls
    solid = _solid(cls)
    usual = solid if solid in (object, types.SimpleNamespace) and cls is not object else Opaque
    return next((base for base in _BASES if base in mro), usual)


def _solid(cls: type) -> type:
    """The first base that is not a class in Python: it says how an object is made."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _HEAP)


@functools.lru_cache(2000)
@skip
def _slots(cls: type) -> list[Any]:
    """The descriptors of the slots that classes in Python have."""
    heap = (base for base in cls.__mro__ if base.__flags__ & _HEAP)
    return [each for base in heap for each in vars(base).values() if type(each) is types.MemberDescriptorType]


class Reach:
    """What an object reaches.

    Args:
        aliases: does this tensor lie in the arena?
        given: arguments of the call; a TensorDict that is one of them is written into, and not copied.
    """

    def __init__(self, aliases: Test, given: tuple[Any, ...]) -> None:
        self._aliases, self._given = aliases, given
        self._objects: list[Any] = []  # keeps them alive, so that an id means one of them
        self._number: dict[int, int] = {}
        self._above: list[list[int]] = []
        self._dirty: set[int] = set()
        self._done: dict[int, Any] = {}
        self._empty: list[tuple[Any, Any]] = []  # copies that are not filled yet, and what they are copies of

    def finds(self, out: Any) -> bool:
        """Does it reach memory of the arena? Raises ProtocolError if it reaches too much to say."""
        others = 0
        found = []
        todo: list[tuple[Any, int]] = [(out, -1)]
        number, objects, above = self._number, self._objects, self._above
        aliases, kind_of = self._aliases, _kind_of
        while todo:
            each, parent = todo.pop()
            cls: Any = type(each)
            kind = kind_of(cls)
            if kind is Plain:
                continue
            known = number.get(id(each))
            if known is not None:
                above[known].append(parent)
                continue
            holds = self._holds(each, kind)
            if kind is Tensor and not holds:
                continue
            here = len(objects)
            number[id(each)] = here
            objects.append(each)
            above.append([parent])
            if holds:
                found.append(here)
                continue
            if kind not in _CONTAINERS:
                others += 1
                if others > _MOST:
                    raise ProtocolError(
                        f"what was returned reaches more than {_MOST} objects, so it cannot be looked through for "
                        f"views of the weights; {_CURE}"
                    )
            for child in _children(each, kind):
                cls = type(child)
                if cls in _EXACTLY_PLAIN or (
                    cls is Tensor and not aliases(child) and child.layout is torch.strided and not child.is_nested
                ):
                    continue
                todo.append((child, here))
        dirty = self._dirty
        while found:
            here = found.pop()
            if here >= 0 and here not in dirty:
                dirty.add(here)
                found += above[here]
        return bool(dirty)

    def copy(self, out: Any) -> Any:
        """The object with copies of every part that holds memory of the arena; other parts are shared.

        Raises ProtocolError for what cannot be copied.
        """
        made = self._made(out)
        while self._empty:
            copy, each = self._empty.pop()
            try:
                self._fill(copy, each)
            except (TypeError, AttributeError, RecursionError) as error:
                raise self._refusal(each) from error
        return made

    def _holds(self, each: Any, kind: type) -> bool:
        """Does it lie in the arena itself?"""
        if kind is Tensor:
            return self._aliases(each) or any(map(self._aliases, _parts(each)))
        if kind is TensorDictLike:
            return _any_leaf(_levels(each), self._aliases)
        if kind is numpy.ndarray:
            return each.size > 0 and self._lies_at(each.__array_interface__["data"][0])
        if kind in _STORAGES:
            untyped = each._untyped_storage if kind is torch.TypedStorage else each
            return self._lies_at(untyped.data_ptr())
        if kind is _CAPSULE:
            return "dltensor" in repr(each)  # a tensor's memory; which one cannot be seen
        if kind is memoryview:
            try:
                return each.nbytes > 0 and self._lies_at(numpy.asarray(each).__array_interface__["data"][0])
            except (TypeError, ValueError):  # released, or of a format without a dtype
                return False
        return False

    def _lies_at(self, address: int) -> bool:
        if not address:
            return False
        return self._aliases(torch.frombuffer((ctypes.c_ubyte * 1).from_address(address), dtype=torch.uint8))

    def _made(self, each: Any) -> Any:
        here = self._number.get(id(each))
        if here is None or here not in self._dirty:
            return each
        if id(each) in self._done:
            return self._done[id(each)]
        try:
            made = self._begun(each)
        except (TypeError, RecursionError) as error:
            raise self._refusal(each) from error
        self._done[id(each)] = made
        return made

    def _begun(self, each: Any) -> Any:
        """A copy; that of what can be changed is filled later, since it may be a part of itself."""
        cls: Any = type(each)
        kind: Any = _kind_of(cls)
        made: Any
        if kind is Tensor:
            return each.clone()
        if kind is TensorDictLike:
            return self._copied_levels(each)
        if kind is numpy.ndarray:
            return self._array(each)
        if kind is memoryview:
            return memoryview(numpy.array(each))  # type: ignore[arg-type]
        if kind is tuple:
            made = [self._made(child) for child in tuple.__iter__(each)]
            of_c = not cls.__flags__ & _HEAP and cls is not tuple  # such as those of torch.return_types
            return cls(made) if of_c else self._with_attributes(tuple.__new__(cls, made), each)
        if kind is frozenset:
            return self._with_attributes(frozenset.__new__(cls, map(self._made, frozenset.__iter__(each))), each)
        if kind is types.MappingProxyType:
            return types.MappingProxyType(self._made(gc.get_referents(each)[0]))
        if kind is functools.partial:
            args, keywords = map(self._made, each.args), {k: self._made(v) for k, v in each.keywords.items()}
            made = functools.partial(self._made(each.func), *args, **keywords)
            _attributes(made).update({k: self._made(v) for k, v in _attributes(each).items()})
            return made
        if kind is types.MethodType:
            return types.MethodType(self._made(each.__func__), self._made(each.__self__))
        if kind is weakref.ref:
            return weakref.ref(self._made(each()))
        if kind in _FILLED and _solid(cls) in kind.__mro__:
            made = kind.__new__(cls)
            self._empty.append((made, each))
            return made
        raise self._refusal(each)

    def _fill(self, made: Any, each: Any) -> None:
        cls: Any = type(each)  # isinstance() would ask the object for its class
        kind: Any = _kind_of(cls)
        if kind is defaultdict:
            _DEFAULT_FACTORY.__set__(made, self._made(_DEFAULT_FACTORY.__get__(each)))
        if kind in (dict, OrderedDict, defaultdict):
            for key, value in kind.items(each):
                kind.__setitem__(made, self._made(key), self._made(value))
        elif kind is deque:
            deque.__init__(made, map(self._made, deque.__iter__(each)), _MAXLEN.__get__(each))
        elif kind is list:
            list.extend(made, map(self._made, list.__iter__(each)))
        elif kind is set:
            set.update(made, map(self._made, set.__iter__(each)))
        self._with_attributes(made, each)

    def _with_attributes(self, made: Any, each: Any) -> Any:
        _attributes(made).update({name: self._made(value) for name, value in _attributes(each).items()})
        cls: Any = type(each)
        for slot in _slots(cls):
            try:
                value = slot.__get__(each)
            except AttributeError:  # it was not set
                continue
            slot.__set__(made, self._made(value))
        return made

    def _array(self, each: Any) -> Any:
        made = each.copy()
        if each.dtype.hasobject:
            for place, value in enumerate(each.flat):
                made.flat[place] = self._made(value)
        return made

    def _copied_levels(self, each: Any) -> Any:
        if not any(each is given for given in self._given):
            each = each.copy()
        levels = _levels(each)
        for key, value in list(levels.items(True, True)):
            if isinstance(value, Tensor) and self._aliases(value):
                levels.set(key, value.clone())
        return each

    def _refusal(self, each: Any) -> ProtocolError:
        here = self._number[id(each)]
        path: list[str] = []
        while here >= 0 and len(path) < 12:
            cls = type(self._objects[here])
            path.append(cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}")
            here = self._above[here][0]
        return ProtocolError(
            f"what was returned holds views of the weights in {' in '.join(path)}, which cannot be copied: it would "
            f"change with the next version; {_CURE}"
        )


def _levels(each: Any) -> Any:
    """A TensorDict itself, or the one inside a tensorclass."""
    return each if is_tensordict(each) else each._tensordict


def _any_leaf(td: Any, test: Test) -> bool:
    # The dict inside it: values() takes 1 µs a leaf, and this runs after each forward.
    store = getattr(td, "_tensordict", None) if type(td) is loaded_class("tensordict", "TensorDict") else None
    for value in (td if type(store) is not dict else store).values():
        if type(value) is Tensor or isinstance(value, Tensor):  # isinstance() of TensorDicts is slow
            if test(value):
                return True
        elif is_tensordict(value) and _any_leaf(value, test):
            return True
    return False


def _attributes(each: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(each, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """What a tensor consists of that is no plain one."""
    parts: list[Any] = []
    if type(tensor) not in (Tensor, nn.Parameter):
        parts += [each for each in _attributes(tensor).values() if isinstance(each, Tensor)]
    try:
        if tensor.layout is torch.strided:
            parts += [tensor.values()] if tensor.is_nested else []
        elif tensor.layout is torch.sparse_coo:
            parts += [indices_of(tensor), values_of(tensor)]
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts += [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts += [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    except RuntimeError:  # a wrapper without memory
        pass
    return parts


def _children(each: Any, kind: type) -> Iterable[Any]:
    """What it holds, as far as that may hold a tensor."""
    if kind is types.FunctionType:  # not its globals
        cells = [cell for cell in each.__closure__ or () if gc.get_referents(cell)]
        return [each.__defaults__, each.__kwdefaults__, _attributes(each), *(cell.cell_contents for cell in cells)]
    if kind is weakref.ref:
        referent = each()
        return [referent] if torch.distributions.Transform in type(referent).__mro__ else ()
    if kind is numpy.ndarray and each.dtype.hasobject:
        return list(each.flat)
    return () if kind in _WHOLE else gc.get_referents(each)


# Dynamo compiles no function of this file.
for _function in (*globals().values(), *vars(Reach).values()):
    if isinstance(_function, types.FunctionType) and _function.__module__ == __name__:
        skip(_function)
