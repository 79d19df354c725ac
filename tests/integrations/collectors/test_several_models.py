"""More than one model at once: a policy, a critic in the environment, a value net and statistics in its transforms."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import Unbounded
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Transform, VecNormV2
from torchrl.weight_update import WeightStrategy

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.environments import Critic, Steps
from support.torchrl.parts import ask, scheme_of, tags
from support.torchrl.policies import Tagged, seen


class WithValue(Transform):
    """Writes what its value net says into each frame."""

    def __init__(self):
        super().__init__()
        self.value_net = Critic()

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("value", self.value_net())

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("value", self.value_net())

    def transform_observation_spec(self, spec):
        spec["value"] = Unbounded((1,))
        return spec


def valued():
    return TransformedEnv(Steps(), WithValue())


def normalising():
    return TransformedEnv(Steps(), VecNormV2(in_keys=["observation"], decay=0.9))


VALUE = "env.transform[0].value_net"


def test_each_model_is_updated_by_its_id(collector):
    policy, critic = Tagged(1), Critic(10)
    schemes = {"policy": ShmWeightSyncScheme(), "env.critic": scheme_of(critic, "env.critic")}
    collecting = collector(policy, schemes=schemes, kind=MultiAsyncCollector)
    assert tags(collecting) == [1, 1] and ask(collecting, "env.critic.read") == [10, 10]
    policy.set(2)
    collecting.update_policy_weights_()
    assert tags(collecting) == [2, 2] and ask(collecting, "env.critic.read") == [10, 10]
    collecting.update_policy_weights_(Critic(20), model_id="env.critic")
    assert tags(collecting) == [2, 2] and ask(collecting, "env.critic.read") == [20, 20]
    collecting.update_policy_weights_(weights_dict={"policy": None, "env.critic": Critic(25)})
    assert tags(collecting) == [2, 2] and ask(collecting, "env.critic.read") == [25, 25]
    collecting.update_policy_weights_(weights_dict={"policy": Tagged(3), "env.critic": {"value": torch.tensor([30.0])}})
    assert tags(collecting) == [3, 3] and ask(collecting, "env.critic.read") == [30, 30]
    batch = next(iter(collecting))
    assert (seen(batch) == 3).all() and (batch["next", "reward"] == 30).all()


def test_a_value_net_in_a_transform(collector):
    value = Critic(5)
    apart = {"per_worker_weights": True}
    schemes = {"policy": ShmWeightSyncScheme(**apart), VALUE: scheme_of(value, VALUE, **apart)}
    collecting = collector(Tagged(), schemes=schemes, env=valued)
    assert ask(collecting, f"{VALUE}.read") == [5, 5]
    batches = iter(collecting)
    assert (next(batches)["next", "value"] == 5).all()
    with torch.no_grad():
        value.value.fill_(6)
    collecting.update_policy_weights_(model_id=VALUE)
    assert (next(batches)["next", "value"] == 6).all()
    collecting.update_policy_weights_(weights_dict={"policy": Tagged(1), VALUE: Critic(7)}, worker_ids=[1])
    assert tags(collecting) == [0, 1] and ask(collecting, f"{VALUE}.read") == [6, 7]


def test_statistics_of_a_transform_are_extra_state(collector):
    """VecNormV2 has no parameters at all: what it knows is its extra state."""
    trained = normalising()
    transform = trained.transform
    trained.rollout(50)
    schemes = {"policy": ShmWeightSyncScheme(), "env.transform[0]": scheme_of(transform, "env.transform[0]")}
    collecting = collector(Tagged(), schemes=schemes, env=normalising)

    def arrived():
        expected = transform.get_extra_state()
        for found in ask(collecting, "env.transform[0].get_extra_state"):
            assert len(found) == len(expected) == 3
            assert all(torch.equal(found[key], value) for key, value in expected.items())

    arrived()
    for form in (lambda: None, lambda: transform, lambda: WeightStrategy().extract_weights(transform)):
        trained.rollout(50)
        collecting.update_policy_weights_(form(), model_id="env.transform[0]")
        arrived()


def test_a_model_that_does_not_fit_leaves_the_others_as_they_are(collector):
    schemes = {"policy": ShmWeightSyncScheme(), "env.critic": scheme_of(Critic(1), "env.critic")}
    collecting = collector(Tagged(1), schemes=schemes)
    with pytest.raises(ValueError, match="value"):
        collecting.update_policy_weights_({"value": torch.ones(2)}, model_id="env.critic")
    assert tags(collecting) == [1, 1] and ask(collecting, "env.critic.read") == [1, 1]
    collecting.update_policy_weights_(Tagged(2))
    assert tags(collecting) == [2, 2]
