"""What may be a leaf, under which key: a tensor whose values lie in its own memory, as plain elements.

The rule names what is known to be plain. A tensor of any other kind is refused, also one that is unknown here:
its storage has no address, or too few bytes. Reading it by address would end the process, or copy garbage.
"""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from ... import _native
from ...errors import ManifestMismatch
from ...memory.arrays import is_array
from ...memory.devices import has_address
from ...memory.manifest import Key

if TYPE_CHECKING:
    from tensordict import TensorDictBase

DEEPEST = 100  # levels of a key path; Python's limit on recursion, which TensorDicts meet, is at some 200
_PLAIN = (torch.Tensor, nn.Parameter)


def loaded_class(module: str, name: str) -> type[Any] | None:
    """A class of a package's, if the module that has it was imported; without that no object can be of this class."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def is_a(value: object, module: str, name: str) -> bool:
    """Is the value of this class?"""
    kind = loaded_class(module, name)
    return kind is not None and isinstance(value, kind)


def is_tensordict(value: object) -> TypeGuard[TensorDictBase]:
    """Is it a TensorDict? Asking imports no tensordict; isinstance() of such an abstract class takes as long again."""
    return getattr(sys.modules.get("tensordict"), "TensorDictBase", None) in type(value).__mro__


def is_wrapper(value: torch.Tensor) -> bool:
    """Is it of a class whose tensors hold others, instead of memory?"""
    return hasattr(type(value), "__tensor_flatten__")


def problem_with_key(key: Key) -> str | None:
    """Why this key path cannot be that of a leaf, or None."""
    if len(key) > DEEPEST:
        return f"has {len(key):,} levels, and {DEEPEST} are the most; flatten the weights, or see what contains itself"
    if "" in key:
        return "has an empty part; give it a name"
    return None


def check_depth(path: Key) -> None:
    """Raise ManifestMismatch where a tree of weights is too deep to go on, as one that contains itself is."""
    if len(path) > DEEPEST:
        raise ManifestMismatch(f"the key {shown(path)} {problem_with_key(path)}")


def shown(key: Key) -> str:
    """A dotted key for an error: one that text cannot hold with escapes, a long one in part."""
    return reprlib.repr(".".join(key))


def problem_with(value: Any) -> str | None:
    """Why this object cannot be a leaf at all, or None."""
    if type(value) in _PLAIN and _native.surely_plain(value):
        return _hanging(value)  # the common case, in 1 µs
    if is_array(value):
        return f"is a numpy array of dtype {value.dtype}, which torch lacks; convert it, or leave it out with exclude="
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, not a tensor; leave it out with exclude="
    if isinstance(value, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return "is not initialised yet; run the lazy module once before publishing it"
    with torch._C.DisableTorchFunction():  # a subclass may answer these questions in its own way, or not at all
        return _kind_problem(value) or _memory_problem(value) or _hanging(value)


def _kind_problem(value: torch.Tensor) -> str | None:
    if is_a(value, "torch.distributed.tensor", "DTensor"):
        return (
            "is a DTensor, of which this process holds a part; pass its full_tensor(), which all ranks must call, or "
            "its to_local()"
        )
    if value.is_nested:
        return "is a nested tensor; pass its values() and offsets(), or a padded tensor"
    if value.layout is not torch.strided:
        return f"is {value.layout}, but only dense tensors can be shared; call .to_dense()"
    if value.is_quantized:
        return "is quantised, but only plain dtypes can be shared; publish its integer representation"
    if value.device.type == "meta":
        return "is on the meta device and has no values; materialise the module first"
    return _no_memory(value) if is_wrapper(value) else None


def _memory_problem(value: torch.Tensor) -> str | None:
    if value.numel() == 0 or (not has_address(value) and type(value) in _PLAIN):
        return None
    try:
        storage = value.untyped_storage()
        address, held = storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # how torch says that there is none, as in torch.func's transforms
        return _no_memory(value)
    needed = (value.storage_offset() + extent(value)) * value.element_size()
    if held < needed:
        return (
            f"has a storage of {held} bytes but needs {needed}: its memory was given back, as FSDP does between two "
            "forward passes; publish while the parameters are there (FSDP.summon_full_params())"
        )
    return None if address else _no_memory(value)


def _no_memory(value: torch.Tensor) -> str:
    return (
        f"is a {type(value).__name__} without its own memory: its values lie in other tensors, or nowhere; pass "
        "those tensors, or a plain one with its values"
    )


def _hanging(value: torch.Tensor) -> str | None:
    """What hangs on a parameter of whole numbers, as the scale of quantised weights does, decides what they mean."""
    if isinstance(value, nn.Parameter) and not (value.dtype.is_floating_point or value.dtype.is_complex):
        for name, each in vars(value).items():
            if _holds_tensor(each):
                return (
                    f"has {value.dtype} values and the tensor {name!r} as an attribute, which would not be published "
                    "with them; make that one a parameter or a buffer of the module"
                )
    return None


def _holds_tensor(value: Any) -> bool:
    """Is it a tensor, or a list, tuple, dict or dataclass that has one?"""
    if isinstance(value, torch.Tensor):
        return True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else ()
    within = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_holds_tensor, within))


def extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one in memory, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
