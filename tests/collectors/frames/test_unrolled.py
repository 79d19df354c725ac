"""The environments of a SyncVectorEnv are stepped by the worker itself, where that gives the same frames."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from support.environments.basic import Always, Constant, InTurn
from support.environments.sync import ACTION_SPACES, Called, derived, patched
from support.environments.vector import MODES, Through, Vectors

ONE = {"num_workers": 1, "frames_per_batch": 40}


def rewards(collector, env):
    """1: the vector environment has called the step; 0: the worker has."""
    found = next(collector(env, Constant(), **ONE))["next", "reward"]
    assert (found == found[0, 0]).all()
    return float(found[0, 0])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_worker_steps_them_itself(collector, mode):
    assert rewards(collector, Vectors("sync", Called, 4, mode)) == 0


@pytest.mark.parametrize("env", [derived, patched])
def test_one_with_a_step_of_its_own_is_asked(collector, env):
    assert rewards(collector, env) == 0.5


def test_one_in_a_wrapper_is_asked(collector):
    assert rewards(collector, Vectors("sync", Called, 4, AutoresetMode.SAME_STEP, wrap=Through)) == 1


@pytest.mark.parametrize("form", ACTION_SPACES)
def test_actions_have_the_type_that_the_vector_environment_gives(collector, form):
    space, action, dtype = ACTION_SPACES[form]
    makers = [functools.partial(Called, space)] * 4
    policy = Always(action, getattr(torch, dtype))
    found = next(collector(Vectors("sync", makers, 4), policy, **ONE))["next", "observation"]
    plain = SyncVectorEnv(makers)
    plain.reset()
    batch = np.stack([np.asarray(action, space.dtype)] * 4)
    expected = torch.from_numpy(plain.step(batch)[0])
    plain.close()
    assert (found == expected[:, None]).all()


def test_two_in_a_worker_of_which_one_is_asked(collector):
    env = InTurn(Vectors("sync", Called, 4), derived)
    found = next(collector(env, Constant(), num_workers=1, envs_per_worker=2, frames_per_batch=80))
    assert (found["next", "reward"][:4] == 1).all() and (found["next", "reward"][4:] == 0.5).all()


def test_gymnasiums_own_way_to_make_one(collector):
    def make():
        return gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync")

    batch = next(collector(make, Constant(), frames_per_batch=80)).clone()
    assert batch.batch_size == (8, 10) and (batch["next", "reward"] == 1).all()
