"""Keys of observations and of what a policy returns: those of the first frame each time, or an error names them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import shmsync
from support.environments.basic import BYTES, Constant, Counting, Odd, Other
from support.environments.vector import Altered, Growing, Halves, NestedEpisodes, OfKey, Vectors, more_keys

NESTED = spaces.Dict({"image": BYTES, "inner": spaces.Dict({"goal": spaces.Discrete(7)})})
RIGHT = {"image": np.zeros(3, np.uint8), "inner": {"goal": 3}}
ONE = {"num_workers": 1, "frames_per_batch": 40}


@pytest.mark.parametrize(
    ("more", "named"),
    [({**RIGHT, "more": 1}, "more"), ({**RIGHT, "inner": {"goal": 3, "more": 1}}, r"inner\.more")],
)
@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_key_that_the_space_lacks_is_refused_from_every_call(collector, call, more, named):
    env = functools.partial(Odd, NESTED, **{"reset": RIGHT, "step": RIGHT, call: more})
    with pytest.raises(shmsync.ManifestMismatch, match=rf"{call}\(\) has {named}, which its space does not have"):
        next(collector(env, Constant(), **ONE))


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Dict({0: BYTES, 1: BYTES}), "the key 0"),
        (spaces.Dict({"a": spaces.Dict({(1, 2): BYTES})}), r"the key \(1, 2\)"),
        (spaces.Dict({"a": spaces.Dict({})}), "a is a Dict without keys"),
        (spaces.Dict({}), "observation is a Dict without keys"),
        (spaces.Dict({"": BYTES}), "an empty part"),
        (spaces.Dict({"\ud800": BYTES}), "a lone surrogate"),
        (spaces.Dict({"a": spaces.Dict({"b\0": BYTES})}), "a NUL character"),
    ],
)
def test_a_dict_space_whose_keys_a_batch_cannot_have_is_refused_by_name(collector, space, named):
    with pytest.raises(shmsync.ManifestMismatch, match=named):
        collector(functools.partial(Odd, space), Constant(), **ONE)


@pytest.mark.parametrize("which", ["space", "action"])
@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple(())], ids=["Dict", "Tuple"])
def test_an_empty_space_is_refused_when_the_collector_is_made(collector, which, space):
    env = functools.partial(Odd, **{"space": BYTES, which: space}, reset=np.zeros(3, np.uint8))
    with pytest.raises((TypeError, shmsync.ManifestMismatch), match=f"{type(space).__name__}"):
        collector(env, Constant(), **ONE)


@pytest.mark.parametrize("key", ["a.b", "a b", "é"])
def test_any_word_is_a_key(collector, key):
    env = functools.partial(Odd, spaces.Dict({key: BYTES}), reset={key: np.ones(3, np.uint8)})
    batch = next(collector(env, OfKey(key), **ONE))
    assert batch["observation", key].shape == (1, 40, 3)


@pytest.mark.parametrize("make", [dict, TensorDict])
@pytest.mark.parametrize("after", [1, 7])
def test_a_key_that_the_policy_returns_later_only_is_refused(collector, make, after):
    with pytest.raises(shmsync.ManifestMismatch, match="'more', which .* first"):
        next(collector(Counting, Growing(make, after), **ONE))


@pytest.mark.parametrize("key", [3, ("a", 3)])
@pytest.mark.parametrize("after", [0, 3])
def test_a_key_of_the_policy_that_is_no_word_is_refused(collector, key, after):
    with pytest.raises(shmsync.ManifestMismatch, match="3"):
        next(collector(Counting, Other({key: torch.zeros(1)}, after), **ONE))


@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_vector_environments_keys_are_checked_too(collector, call):
    wrap = functools.partial(Altered, change=more_keys, call=call)
    with pytest.raises(shmsync.ManifestMismatch, match=rf"{call}\(\) has more, which its space does not have"):
        next(collector(Vectors("sync", NestedEpisodes, 2, wrap=wrap), Halves(), **ONE))
