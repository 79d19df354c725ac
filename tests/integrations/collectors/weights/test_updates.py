"""What update_policy_weights_ takes, and whom it reaches."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.calls import Call
from support.torchrl.parts import ask, tags
from support.torchrl.policies import Tagged, seen


@pytest.mark.parametrize(("strategy", "slots"), [("tensordict", 1), ("state_dict", 2)])
def test_each_strategy_and_number_of_slots_follows_a_row_of_updates(collector, strategy, slots):
    policy = Tagged()
    collecting = collector(policy, scheme=ShmWeightSyncScheme(strategy, slots=slots))
    batches = iter(collecting)
    for tag in range(1, 6):
        policy.set(tag)
        collecting.update_policy_weights_()
        assert seen(next(batches)).unique().tolist() == [tag]


def test_an_update_by_keyword_and_by_model_id(collector):
    collecting = collector(Tagged())
    collecting.update_policy_weights_(weights=TensorDict.from_module(Tagged(7)).data)
    assert tags(collecting) == [7, 7]
    collecting.update_policy_weights_(policy=Tagged(8), model_id="policy")
    assert tags(collecting) == [8, 8]
    collecting.update_policy_weights_(weights_dict={"policy": Tagged(9)})
    assert tags(collecting) == [9, 9]


def test_a_partial_update_changes_what_it_names(collector):
    collecting = collector(Tagged())
    first, second, third = (torch.full((4,), value) for value in (1.0, 2.0, 3.0))
    for weights in (TensorDict({"layers": {"1": first}}), TensorDict({"layers.1": second}), {"layers.1": third}):
        collecting.update_policy_weights_(weights)
        (sent,) = TensorDict(weights).values(True, True)
        for found in ask(collecting, "policy.read"):
            assert torch.equal(found["layers.1"], sent)
            assert found["layers.0"].tolist() == [0, 0, 0, 0] and found["tag"].tolist() == [0]


def test_each_worker_can_get_weights_of_its_own(collector):
    collecting = collector(Tagged(), scheme=ShmWeightSyncScheme(per_worker_weights=True))
    collecting.update_policy_weights_({0: TensorDict.from_module(Tagged(1)), 1: Tagged(2).state_dict()})
    assert tags(collecting) == [1, 2]
    collecting.update_policy_weights_({1: Tagged(3)})
    assert tags(collecting) == [1, 3]
    collecting.update_policy_weights_({0: Tagged(4), 1: Tagged(5)}, worker_ids=[0])
    assert tags(collecting) == [4, 3]
    batch = next(iter(collecting))
    assert seen(batch).float().mean(1).tolist() == [4, 3]
    assert batch["next", "policy_version"].float().mean(1).tolist() == [2, 2]  # each had two updates
    collecting.update_policy_weights_(Tagged(6))
    assert tags(collecting) == [6, 6]


def test_worker_ids_choose_workers_by_index_and_by_device(collector):
    policy, device = Tagged(), torch.device("cuda:3")
    scheme = ShmWeightSyncScheme(per_worker_weights=True)
    scheme.init_on_sender(model=policy, devices=[torch.device("cpu"), device], model_id="policy")
    collecting = collector(policy, scheme=scheme)
    for tag, worker_ids in enumerate((1, [1], "cuda:3", device, ["cuda:3"], [device]), 1):
        policy.set(tag)
        collecting.update_policy_weights_(worker_ids=worker_ids)
        assert tags(collecting) == [0, tag], worker_ids
    policy.set(9)
    collecting.update_policy_weights_(worker_ids=[0, 1])
    assert tags(collecting) == [9, 9]


def test_workers_that_share_their_weights_get_the_same_updates(collector):
    policy = Tagged()
    collecting = collector(policy)
    other = Tagged(3)
    for weights, worker_ids in ((Tagged(1), [0]), ({0: Tagged(1), 1: Tagged(2)}, None), ({1: Tagged(1)}, None)):
        with pytest.raises(ValueError, match=r"workers \[0, 1\] share their weights.*per_worker_weights=True"):
            collecting.update_policy_weights_(weights, worker_ids=worker_ids)
    assert tags(collecting) == [0, 0]
    collecting.update_policy_weights_({0: other, 1: other})
    assert tags(collecting) == [3, 3]
    policy.set(4)
    collecting.update_policy_weights_(worker_ids=[0, 1])
    assert tags(collecting) == [4, 4]


def test_an_unknown_worker_is_refused_and_nothing_is_sent(collector):
    collecting = collector(Tagged())
    for worker_ids in (2, [0, 2], "cuda:0", torch.device("meta"), -1, True):
        with pytest.raises(ValueError, match="Worker|worker"):
            collecting.update_policy_weights_(Tagged(1), worker_ids=worker_ids)
    with pytest.raises(ValueError, match="Worker 5 not registered"):
        collecting.update_policy_weights_({0: Tagged(1), 5: Tagged(2)})
    collecting.update_policy_weights_(Tagged(1), worker_ids=[])  # for none of them
    assert tags(collecting) == [0, 0]
    collecting.update_policy_weights_(Tagged(2))
    assert tags(collecting) == [2, 2]


def test_updates_may_come_from_several_threads(collector):
    collecting = collector(Tagged())
    threads = [Call(lambda: [collecting.update_policy_weights_(Tagged(n)) for n in range(30)]) for _ in range(3)]
    for thread in threads:
        thread.result()
    assert tags(collecting) == [29, 29]
    assert (next(iter(collecting))["policy_version"] == 90).all()


@pytest.mark.slow
def test_a_compiled_policy_uses_what_arrives(collector):
    policy = Tagged()
    collecting = collector(policy, compile_policy={"backend": "eager", "warmup": 1})
    batches = iter(collecting)
    for tag in range(4):
        policy.set(tag)
        collecting.update_policy_weights_()
        assert seen(next(batches)).unique().tolist() == [tag]
