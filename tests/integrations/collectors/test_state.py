"""Loading a state into workers whose policy is read-only memory, and updates that do not fit."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.parts import tags
from support.torchrl.policies import Tagged, seen


def with_weights(state, *values):
    for worker, value in enumerate(values):
        policy = state[f"worker{worker}"]["policy_state_dict"]
        state[f"worker{worker}"]["policy_state_dict"] = {
            key: torch.full_like(weight, value) for key, weight in policy.items()
        }
    return state


@pytest.mark.parametrize("slots", [1, 2])
def test_a_loaded_state_is_the_workers_own_until_the_next_update(collector, slots):
    policy = Tagged(1)
    collecting = collector(policy, scheme=ShmWeightSyncScheme(slots=slots))
    batches = iter(collecting)
    collecting.load_state_dict(with_weights(collecting.state_dict(), 5, 6))
    assert tags(collecting) == [5, 6]
    assert seen(next(batches)).float().mean(1).tolist() == [5, 6]
    assert policy.layers[0].tolist() == [1] * 4
    for update in (1, 7, 8):  # first the weights of before, which undo the load
        policy.set(update)
        collecting.update_policy_weights_()
        assert tags(collecting) == [update, update]
        assert seen(next(batches)).unique().tolist() == [update]
    collecting.load_state_dict(with_weights(collecting.state_dict(), 9, 9))
    assert tags(collecting) == [9, 9]


def half_fitting(policy):
    """Its first weight is new and fits, its second does not."""
    weights = TensorDict.from_module(policy).data.clone()
    weights["layers", "0"] = torch.full((4,), 9.0)
    weights["layers"].set("1", torch.full((5,), 9.0))
    return weights


FORMS = {
    "tensordict": half_fitting,
    "state dict": lambda policy: half_fitting(policy).flatten_keys(".").to_dict(),
    "per worker": lambda policy: {0: Tagged(9), 1: half_fitting(policy)},
}


def test_a_wrong_shape_half_way_through_changes_nothing_anywhere(collector):
    policy = Tagged(1)
    collecting = collector(policy, scheme=ShmWeightSyncScheme(per_worker_weights=True))
    for form in FORMS.values():
        with pytest.raises(shmsync.ManifestMismatch, match=r"layers\.1 .*\(5,\)") as caught:
            collecting.update_policy_weights_(form(policy))
        assert isinstance(caught.value, ValueError)
        assert tags(collecting) == [1, 1]
        assert all((weight == 1).all() for weight in policy.state_dict().values())
    batch = next(iter(collecting))
    assert seen(batch).unique().tolist() == [1] and (batch["policy_version"] == 0).all()
    policy.set(2)
    collecting.update_policy_weights_()
    assert tags(collecting) == [2, 2]
