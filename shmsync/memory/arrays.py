"""numpy arrays as weights: each becomes a tensor over the same memory."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch


def is_array(value: object) -> bool:
    """Is it a numpy array? Without numpy nothing is."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def tensor_over(array: Any) -> Any:
    """A tensor over the array's memory; over a copy where torch has no such layout, the array where it has no dtype."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one that is read-only: nothing writes into a source
            try:
                return torch.from_numpy(array)
            except ValueError:  # negative strides, or the other byte order
                return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError):
        return array
