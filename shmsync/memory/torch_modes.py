"""Running torch operations on real memory, whatever modes the caller has switched on.

A user may call us under torch.device("meta"), set_default_device(), inference_mode(), a TorchFunctionMode, or a
TorchDispatchMode such as FakeTensorMode. Each of them changes what an operation makes, or whether it is carried out at
all: under FakeTensorMode copy_() copies nothing. Whatever we make or copy is made and copied inside plainly().
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from .. import _native

P = ParamSpec("P")
R = TypeVar("R")


_changes = operator.attrgetter("_version")  # how often a tensor was written into


def counts_changes(tensor: torch.Tensor) -> bool:
    """Does autograd count the changes of this tensor? Call it inside plainly().

    It has no counter for one that was made in inference mode, also where `.data =` has made it an ordinary one since.
    """
    try:
        return not tensor.is_inference() and bool(_changes(tensor) >= 0)
    except RuntimeError:  # how torch says that there is no counter
        return False


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """target.copy_(source), also when the target was made in inference mode. Call it inside plainly()."""
    if not counts_changes(target):
        with torch._C._InferenceMode(True):  # not torch.inference_mode(), which an interrupt may leave switched on
            target.copy_(source)
    else:
        target.copy_(source)


_MAKERS = (
    torch._C.DisableTorchFunction,  # what torch.overrides and torch.utils._python_dispatch are made of
    torch._C._DisableTorchDispatch,
    # Tensors made in inference mode could never be trained. Leaving it also puts the gradients' mode back.
    partial(torch._C._InferenceMode, False),
)
_no_gradients = partial(torch._C._set_grad_enabled, False)


def plainly() -> _native.Together:
    """No mode and no tensor subclass sees the operations inside, and no gradient is recorded. It costs a few µs.

    An interrupt leaves none of it switched on: `with plainly():` is one native step, which torch.no_grad() is not.
    """
    return _native.Together(_MAKERS, _no_gradients)


def run_plainly(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function runs inside plainly()."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with plainly():
            return function(*args, **kwargs)

    return run
