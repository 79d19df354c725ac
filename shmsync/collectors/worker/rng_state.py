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
        "python": random.getstate(),
        "environments": [[_plain(each.bit_generator.state) for each in _of(env)] for env in envs],
    }


def restore(state: dict[str, Any], envs: Sequence[Any]) -> None:
    """Give all of them the state that generators() gave. NumPy takes lists in the place of arrays."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    for env, states in zip(envs, state["environments"], strict=True):
        found = _of(env)
        for generator, each in zip(found, states, strict=True):
            generator.bit_generator.state = each
        if hasattr(env.unwrapped, "processes"):  # what they gave are copies
            env.unwrapped.set_attr("np_random", found)


def _of(env: Any) -> list[np.random.Generator]:
    """The generators of an environment; of a vector environment those of each, or the one that it has."""
    found = env.unwrapped.np_random
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _plain(value: Any) -> Any:
    """A state with lists in the place of arrays, and Python's numbers in that of NumPy's."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value
