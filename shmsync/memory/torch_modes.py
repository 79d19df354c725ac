"""Running torch operations on real memory, whatever modes the caller has switched on.

A user may call us under torch.device("meta"), set_default_device(), inference_mode(), a TorchFunctionMode, or a
TorchDispatchMode such as FakeTensorMode. Each of them changes what an operation makes, or whether it is carried out at
all: under FakeTensorMode copy_() copies nothing. Whatever we make or copy is made and copied inside plainly().
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def counts_changes(tensor: torch.Tensor) -> bool:
    """Does autograd count the changes of this tensor? Call it inside plainly().

    It has no counter for one that was made in inference mode, also where `.data =` has made it an ordinary one since.
    """
    try:
        return not tensor.is_inference() and tensor._version >= 0
    except RuntimeError:  # how torch says that there is no counter
        return False


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """target.copy_(source), also when the target was made in inference mode. Call it inside plainly()."""
    if not counts_changes(target):
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


@contextmanager
def plainly() -> Iterator[None]:
    """No mode and no tensor subclass sees the operations inside, and no gradient is recorded. It costs a few µs."""
    _C = torch._C  # what torch.overrides and torch.utils._python_dispatch are made of
    # Tensors made in inference mode could never be trained. Leaving it also puts the gradients' mode back.
    with _C.DisableTorchFunction(), _C._DisableTorchDispatch(), _C._InferenceMode(False):
        _C._set_grad_enabled(False)
        yield


run_plainly = plainly()  # a decorator: the function runs inside plainly()
