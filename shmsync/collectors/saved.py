"""A worker's random generators as numbers, strings, lists and dicts: what torch.load() takes with its defaults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def generators(envs: Sequence[Any]) -> dict[str, Any]:
    """The state of every random generator of this process that a policy or an environment draws from."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": _plain(np.random.get_state()),
        "python": _plain(random.getstate()),
        "environments": [_plain(env.unwrapped.np_random.bit_generator.state) for env in envs],
    }


def restore(state: dict[str, Any], envs: Sequence[Any]) -> None:
    """Give all of them the state that generators() gave."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    np.random.set_state(_rebuilt(state["numpy"]))
    random.setstate(_rebuilt(state["python"]))
    for env, generator in zip(envs, state["environments"], strict=True):
        env.unwrapped.np_random.bit_generator.state = _rebuilt(generator)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.str}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _rebuilt(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"array", "dtype"}:
            return np.array(value["array"], np.dtype(value["dtype"]))
        return {key: _rebuilt(each) for key, each in value.items()}
    return tuple(map(_rebuilt, value)) if isinstance(value, tuple) else value
