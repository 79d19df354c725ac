"""Cast the floating leaves of weights in any form: for dtype= of schemes and strategies.

Leaves that a Publisher casts are not cast here, but while they are copied into the slot: engine/copy/converting.py.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from glob import escape
from typing import Any

import torch
from tensordict import TensorDictBase

from ..engine.source.dtypes import Dtypes, cast_leaves, kept_leaves, matching_patterns
from ..engine.source.leaf_check import problem_with
from ..engine.source.sources import EVERYTHING, collect
from ..memory.arena import nested
from ..memory.manifest import Key, Manifest, tie
from ..memory.torch_modes import run_plainly
from . import extra_state


@run_plainly
def cast_tensors(
    tensors: Mapping[Key, Any], dtype: Dtypes, *, partial: bool, kept: Container[Key] = ()
) -> dict[Key, Any]:
    """These leaves, cast as Publisher(dtype=) casts them. What has its dtype already is the same object.

    Leaves that were one tensor are one tensor afterwards. `partial`: patterns that match none of them are no error,
    since they may be for the others. `kept`: leaves that one dtype for all leaves alone.

    Raises ManifestMismatch as cast_leaves() does.
    """
    sound = {key: each for key, each in tensors.items() if not problem_with(each)}  # the others are refused by name
    made: dict[Any, torch.Tensor] = {}
    found = dict(tensors)
    for key, wanted in cast_leaves(sound, matching_dtypes(sound, dtype) if partial else dtype, kept).items():
        source = sound[key]
        if source.dtype != wanted:
            identity = tie(source) or id(source)
            if identity not in made:
                made[identity] = source.detach().to(wanted)
            found[key] = made[identity]
    return found


def cast_weights(weights: Any, dtype: Dtypes, *, partial: bool, kept: Collection[Key] = ()) -> Any:
    """Weights in the form that they have, cast as cast_tensors() does; None and what is no weights as it is.

    `kept`: leaves that one dtype for all leaves alone, beside those that are buffers by their type.
    """
    if dtype is None or not isinstance(weights, (TensorDictBase, Mapping)):
        return weights
    if isinstance(weights, TensorDictBase):
        given = collect(weights, EVERYTHING).tensors
    else:  # beside tensors a state_dict has what modules keep beside theirs
        plain = {key: each for key, each in weights.items() if str(key).rpartition(".")[2] not in extra_state.KEYS}
        given = collect(plain, EVERYTHING).tensors
    named = {tuple(".".join(key).split(".")): value for key, value in given.items()}
    others = {key: named.pop(key) for key in list(named) if key[-1] in extra_state.KEYS}
    cast = cast_tensors(named, dtype, partial=partial, kept=kept_leaves(weights, named) | set(kept))
    if not isinstance(weights, TensorDictBase):
        return _rebuilt(weights, "", {".".join(key): value for key, value in cast.items()})
    made = nested(cast)
    for key, value in others.items():
        made.set(key, value)
    return made


def _rebuilt(weights: Mapping[str, Any], prefix: str, cast: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in weights.items():
        name = f"{prefix}{key}"
        is_extra = key.rpartition(".")[2] in extra_state.KEYS
        inner = isinstance(value, Mapping) and not is_extra
        made[key] = _rebuilt(value, f"{name}.", cast) if inner else cast.get(name, value)
    return made


def dtypes_of(manifest: Manifest) -> Dtypes:
    """The dtype= that casts the leaves which this arena casts, and to the same."""
    return {escape(leaf.name): leaf.dtype for leaf in manifest.leaves if leaf.cast} or None


def matching_dtypes(tensors: Mapping[Key, torch.Tensor], dtype: Dtypes) -> Dtypes:
    """dtype= without the patterns that cast none of these leaves."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    used = set(matching_patterns(tensors, dtype).values())
    return {pattern: each for pattern, each in dtype.items() if pattern in used}
