"""Values of environments and policies on their way into arrays of a fixed shape and dtype.

Rounding to a smaller floating dtype is expected, and so is nothing else: where the value would become another one, or
would be repeated to fill a larger shape, there is an error that names it. Nearly all values have the right shape and
dtype already, and do not come here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataMismatch

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def fit(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> Any:
    """The value in this dtype and shape. Raises DataMismatch, which calls it `what`, where that would change it."""
    array = _as_array(value, what)
    if array.shape != shape:
        raise DataMismatch(
            f"{what} has shape {array.shape} but the space says {shape}; nothing is repeated to fill it. Correct the "
            "space, or what the environment returns"
        )
    return cast(array, dtype, what)


def cast(array: NDArray[Any], dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """The array in this dtype. Raises DataMismatch where a value would become another one."""
    if array.dtype == dtype:
        return array
    if np.can_cast(array.dtype, dtype, "safe"):
        return array.astype(dtype)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            made = array.astype(dtype)
        kept = np.isinf(made) == np.isinf(array)
    elif dtype.kind in "iu" and array.dtype.kind in "iu":
        made = array.astype(dtype)
        kept = (made.astype(array.dtype) == array) & ((made < 0) == (array < 0))  # the same bits, and the same sign
    else:
        with np.errstate(invalid="ignore"):
            made = array.astype(dtype)
        kept = made == array
    if not kept.all():
        at = np.argwhere(~np.atleast_1d(kept))[0]
        before, after = np.atleast_1d(array)[tuple(at)], np.atleast_1d(made)[tuple(at)]
        raise DataMismatch(
            f"{what} has the value {before} in {array.dtype}, which would be {after} in {dtype}; let the space "
            "have a dtype that can hold it, or convert it before"
        )
    return made


def number(value: Any, what: str) -> float:
    """A reward. Raises DataMismatch where it is not one number, or too large for float32."""
    if isinstance(value, float) and -LARGEST_FLOAT32 <= value <= LARGEST_FLOAT32:
        return float(value)
    return float(numbers(_as_array(value, what).reshape(-1), 1, what)[0])


def flag(value: Any, what: str) -> bool:
    """True or False. Raises DataMismatch for anything that is not one of them."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return bool(flags(_as_array(value, what).reshape(-1), 1, what)[0])


def numbers(values: Any, count: int, what: str) -> NDArray[np.float64]:
    """The rewards of that many environments. Raises DataMismatch as number() does."""
    array = _one_each(values, count, what)
    cast(array, np.dtype(np.float32), what)  # refuses what is too large
    return array.astype(np.float64, copy=False)


def flags(values: Any, count: int, what: str) -> NDArray[np.bool_]:
    """True or False for that many environments. Raises DataMismatch as flag() does."""
    return cast(_one_each(values, count, what), np.dtype(np.bool_), what)


def _one_each(values: Any, count: int, what: str) -> NDArray[Any]:
    array = _as_array(values, what)
    if array.shape != (count,):
        raise DataMismatch(f"{what} has shape {array.shape}, and must be one value for each of {count} environment(s)")
    return array


def _as_array(value: Any, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise DataMismatch(f"{what} is a {type(value).__name__} that is no array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise DataMismatch(f"{what} is a {type(value).__name__} with dtype {array.dtype}, and must have numbers")
    return array
