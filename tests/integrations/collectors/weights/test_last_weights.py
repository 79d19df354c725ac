"""What an update without weights sends: the policy as it is now; where there is none, the last weights."""

from __future__ import annotations

import pytest
from tensordict import TensorDict

from support.torchrl.parts import tags
from support.torchrl.policies import Tagged, seen

FORMS = {
    "module": Tagged,
    "tensordict": lambda tag: TensorDict.from_module(Tagged(tag)),
    "dotted tensordict": lambda tag: TensorDict.from_module(Tagged(tag)).data.flatten_keys("."),
    "plain tensordict": lambda tag: TensorDict.from_module(Tagged(tag)).data,
    "state dict": lambda tag: Tagged(tag).state_dict(),
    "nested dict": lambda tag: TensorDict.from_module(Tagged(tag)).data.to_dict(),
    "by worker": lambda tag: dict.fromkeys((0, 1), Tagged(tag)),
}


def test_an_update_without_weights_sends_the_policy_as_it_is(collector):
    policy = Tagged()
    collecting = collector(policy)
    batches = iter(collecting)
    for number, (name, form) in enumerate(FORMS.items(), 1):
        collecting.update_policy_weights_(form(100 + number))
        assert tags(collecting) == [100 + number] * 2, name  # before the update returns
        policy.set(number)
        collecting.update_policy_weights_()
        assert tags(collecting) == [number, number], name
        assert seen(next(batches)).unique().tolist() == [number]


@pytest.mark.parametrize("factories", [[lambda: Tagged(1), lambda: Tagged(1)], lambda: Tagged(1)])
def test_workers_with_policies_of_their_own_keep_their_last_weights(collector, factories):
    collecting = collector(policy_factory=factories)
    collecting.update_policy_weights_()
    assert tags(collecting) == [1, 1]
    collecting.update_policy_weights_(Tagged(5))
    collecting.update_policy_weights_()
    assert tags(collecting) == [5, 5]
