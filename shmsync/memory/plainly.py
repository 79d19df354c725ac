"""Running torch operations on real memory, whatever modes the caller has switched on.

A user may call us under torch.device("meta"), set_default_device(), inference_mode(), a TorchFunctionMode, a
TorchDispatchMode such as FakeTensorMode, or inside torch.func.grad and vmap. Each of them changes what an operation
makes, or whether it is carried out at all: under FakeTensorMode copy_() copies nothing. Whatever we make or copy is
made and copied inside plainly().
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


def _transforms() -> Any:
    """The dispatch keys with which torch.func wraps what is made inside it; None: this torch does not show them."""
    try:
        front, back = (
            torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"FuncTorchDynamicLayer{end}Mode"))
            for end in ("Front", "Back")
        )
        with torch._C._ExcludeDispatchKeyGuard(front | back):
            return front | back
    except (AttributeError, TypeError):
        return None


_TRANSFORMS = _transforms()
_level = getattr(torch._C._functorch, "maybe_current_level", None)


def _outside_transforms() -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if _TRANSFORMS is None else torch._C._ExcludeDispatchKeyGuard(_TRANSFORMS)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """target.copy_(source), also when the target was made in inference mode. Call it inside plainly()."""
    if target.is_inference():
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


def modes_are_on() -> bool:
    """Is there a torch.func transform, which would wrap even what `tensor.data = x` is given? A look of 50 ns."""
    return _level is not None and _level() is not None


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """No mode and no tensor subclass sees the operations inside, and no gradient is recorded. It costs about 7 µs.

    Also a decorator: `@plainly()`.
    """
    with (
        torch._C.DisableTorchFunction(),  # what torch.overrides and torch.utils._python_dispatch are made of
        torch._C._DisableTorchDispatch(),
        _outside_transforms(),
        torch.inference_mode(False),  # tensors made in inference mode could never be trained
        torch.no_grad(),
    ):
        yield
