"""numpy arrays and numbers as weights: each becomes a tensor; an array's shows the same memory."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

# Python's own numbers keep their values: a float has 64 bits.
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def is_array(value: object) -> bool:
    """Is it a numpy array, or a number of numpy? Without numpy nothing is."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def as_tensor(value: Any) -> Any:
    """A tensor for an array or a number; over a copy where torch has no such layout. Any other object as it is.

    That is also what is returned for a dtype that torch lacks, and for a number that is too large.
    """
    if isinstance(value, torch.Tensor):
        return value
    try:
        if is_array(value):
            return _tensor_over(sys.modules["numpy"].asarray(value))
        dtype = _NUMBERS.get(type(value))
        return value if dtype is None else torch.tensor(value, dtype=dtype, device="cpu")
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return value


def _tensor_over(array: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one that is read-only: nothing writes into a source
        try:
            return torch.from_numpy(array)
        except ValueError:  # negative strides, or the other byte order
            return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
