"""What update_policy_weights_() without weights sends: the policy if it has changed, else the last weights again."""

from __future__ import annotations

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


def test_the_last_weights_stay_until_the_policy_changes(collector):
    policy = Tagged()
    collecting = collector(policy)
    batches = iter(collecting)
    for number, (name, form) in enumerate(FORMS.items(), 1):
        for tag in (100 + number, 200 + number):
            collecting.update_policy_weights_(form(tag))
            assert tags(collecting) == [tag, tag], name  # before the update returns
            for _ in range(2):
                collecting.update_policy_weights_()
                assert tags(collecting) == [tag, tag], name
        policy.set(number)
        collecting.update_policy_weights_()
        assert tags(collecting) == [number, number], name
        assert seen(next(batches)).unique().tolist() == [number]


def test_workers_with_policies_of_their_own_keep_their_last_weights(collector):
    made = [Tagged(1), Tagged(2)]
    collecting = collector(policy_factory=[lambda: made[0], lambda: made[1]])
    collecting.update_policy_weights_()
    assert tags(collecting) == [1, 2]
    collecting.update_policy_weights_({0: Tagged(5), 1: TensorDict.from_module(Tagged(6))})
    collecting.update_policy_weights_()
    assert tags(collecting) == [5, 6]
    made[1].set(7)
    collecting.update_policy_weights_()
    assert tags(collecting) == [5, 7]
    collecting.update_policy_weights_({1: Tagged(8)})
    made[0].set(9)
    collecting.update_policy_weights_()
    assert tags(collecting) == [9, 8]
