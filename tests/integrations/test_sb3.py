"""Stable-Baselines3: the policy, and what normalises its observations, travel as one version."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shmsync


@pytest.fixture(autouse=True)
def stable_baselines3():
    pytest.importorskip("stable_baselines3")  # not for each process that collects tests


@pytest.mark.parametrize("form", ["policy", "with statistics", "with a dict of them"])
def test_a_version_has_the_policy_and_its_statistics(form):
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.envs import SimpleMultiObsEnv
    from stable_baselines3.common.vec_env import VecNormalize

    from shmsync.integrations.sb3 import PublishCallback

    several = form == "with a dict of them"
    env = make_vec_env(lambda: SimpleMultiObsEnv(), 1) if several else make_vec_env("CartPole-v1", 1)
    env = env if form == "policy" else VecNormalize(env, norm_obs_keys=["vec"] if several else None)
    kind = "MultiInputPolicy" if several else "MlpPolicy"
    model = PPO(kind, env, n_steps=16, batch_size=16, n_epochs=1, device="cpu")
    whole = PublishCallback.weights(model)
    with shmsync.Publisher(whole["policy"] if form == "policy" else whole) as pub:
        model.learn(32, callback=PublishCallback(pub))
        assert pub.version == 4  # the first, two rollouts, and the end
        found = pub.state_dict()
    prefix = "" if form == "policy" else "policy."
    for name, value in model.policy.state_dict().items():
        assert torch.equal(found.pop(prefix + name), value)
    if form == "policy":
        return
    statistics = env.obs_rms["vec"] if several else env.obs_rms
    at = "obs_rms.vec." if several else "obs_rms."
    for name in ("mean", "var", "count"):
        np.testing.assert_array_equal(found.pop(at + name).numpy(), getattr(statistics, name))
    assert not found


def test_statistics_of_other_names_are_refused_with_the_cure():
    from shmsync.integrations.sb3 import PublishCallback

    said = r"know mean, .*PublishCallback\.weights\(model\)"
    whole = {"policy": torch.nn.Linear(1, 1), "mean": np.zeros(2)}
    with shmsync.Publisher(whole) as pub, pytest.raises(shmsync.ProtocolError, match=said):
        PublishCallback(pub)
