"""The environments of a SyncVectorEnv are stepped by the worker itself, where that gives the same frames."""

from __future__ import annotations

import pytest
from gymnasium.vector import AutoresetMode

from support.environments.basic import Constant
from support.environments.vector import Called, Through, Vectors, derived

ONE = {"num_workers": 1, "frames_per_batch": 40}
WAYS = {  # how it is made, and the reward: 1 where the vector environment has called the step, 0 where the worker has
    "plain": (Vectors("sync", Called, 4), 0),
    "derived": (derived, 0.5),
    "wrapped": (Vectors("sync", Called, 4, AutoresetMode.SAME_STEP, wrap=Through), 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_steps_them_itself_unless_they_have_a_step_of_their_own(collector, way):
    env, reward = WAYS[way]
    assert (next(collector(env, Constant(), **ONE))["next", "reward"] == reward).all()
