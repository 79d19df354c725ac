"""What update_policy_weights_() without weights sends: the policy if it has changed, else the last weights again."""

from __future__ import annotations

import pytest
import torch
import torchrl
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.environments import Critic, Steps
from support.torchrl.parts import ask, tags
from support.torchrl.policies import Tagged, seen

KINDS = [MultiSyncCollector, MultiAsyncCollector]
CPU = [torch.device("cpu")] * 2

FORMS = {
    "module": Tagged,
    "tensordict": lambda tag: TensorDict.from_module(Tagged(tag)),
    "dotted tensordict": lambda tag: TensorDict.from_module(Tagged(tag)).data.flatten_keys("."),
    "plain tensordict": lambda tag: TensorDict.from_module(Tagged(tag)).data,
    "state dict": lambda tag: Tagged(tag).state_dict(),
    "nested dict": lambda tag: TensorDict.from_module(Tagged(tag)).data.to_dict(),
    "by worker": lambda tag: {0: Tagged(tag), 1: TensorDict.from_module(Tagged(tag))},
}


def fill(policy, tag):
    policy.set(tag)


def fill_data(policy, tag):
    for tensor in policy.state_dict().values():
        tensor.data.fill_(tag)


def fill_arrays(policy, tag):
    for tensor in policy.state_dict().values():
        tensor.numpy()[:] = tag


def fill_in_inference(policy, tag):
    with torch.inference_mode():
        policy.set(tag)


def load(policy, tag):
    policy.load_state_dict(Tagged(tag).state_dict())


def assign_data(policy, tag):
    for tensor in (*policy.parameters(), *policy.buffers()):
        tensor.data = torch.full_like(tensor, tag)


def replace(policy, tag):
    policy.layers = nn.ParameterList([torch.full((4,), float(tag)) for _ in range(2)])
    policy.tag = torch.tensor([float(tag)])


WRITES = [fill, fill_data, fill_arrays, fill_in_inference, load, assign_data, replace]


def of_the_scheme(start):
    """Workers make their own policies; the scheme is given the trainer's."""
    return lambda policy: ({"policy_factory": Tagged}, start(policy))


HOLDERS = {  # what a collector and a scheme are given
    "the collector": lambda policy: ({"policy": policy}, {}),
    "the scheme": of_the_scheme(lambda policy: {"model": policy, "devices": CPU}),
    "the scheme, as tensors": of_the_scheme(lambda policy: {"weights": TensorDict.from_module(policy), "devices": CPU}),
    "the scheme, for each worker": of_the_scheme(
        lambda policy: {"params_map": dict.fromkeys((0, 1), TensorDict.from_module(policy))}
    ),
    "the scheme, through a map": of_the_scheme(
        lambda policy: {"model": policy, "device_map_fn": lambda _, td: td.clone(), "num_workers": 2}
    ),
    "the collector, beside a factory": lambda policy: ({"policy": policy, "policy_factory": Tagged}, {}),
    "a factory": lambda policy: ({"policy_factory": lambda: policy}, {}),
    "a factory for each worker": lambda policy: ({"policy_factory": [lambda: policy, lambda *_: policy]}, {}),
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


@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_the_policy(collector, holder):
    policy = Tagged(3)
    arguments, start = HOLDERS[holder](policy)
    scheme = ShmWeightSyncScheme()
    if start:
        scheme.init_on_sender(model_id="policy", **start)
    collecting = collector(scheme=scheme, **arguments)
    assert tags(collecting) == [3, 3]
    collecting.update_policy_weights_(Tagged(5))
    collecting.update_policy_weights_()
    assert tags(collecting) == [5, 5]
    policy.set(6)
    collecting.update_policy_weights_()
    assert tags(collecting) == [6, 6]


def test_every_way_to_change_the_policy_counts(collector):
    policy = Tagged()
    collecting = collector(policy)
    for tag, write in enumerate(WRITES, 6):
        collecting.update_policy_weights_(Tagged(5))
        collecting.update_policy_weights_()
        assert tags(collecting) == [5, 5]
        write(policy, tag)
        collecting.update_policy_weights_()
        assert tags(collecting) == [tag, tag], write


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


@pytest.mark.parametrize("kind", KINDS)
def test_weights_given_between_batches_are_collected_with(collector, kind):
    policy = Tagged()
    collecting = collector(policy, kind=kind, update_at_each_batch=True)
    batches = iter(collecting)
    next(batches)
    steps = [(collecting.update_policy_weights_, 5), (collecting.update_policy_weights_, 6), (None, 7)]
    if kind is MultiAsyncCollector and torchrl.__version__.startswith("0.13"):
        steps.pop()  # there it updates before the first batch alone
    for write, tag in steps:
        policy.set(tag) if write is None else write(Tagged(tag))
        in_a_row = 0
        for _ in range(40):  # an asynchronous collector may have had batches ready, of each worker
            in_a_row = in_a_row + 1 if seen(next(batches)).unique().tolist() == [tag] else 0
            if in_a_row == 4:
                break
        assert in_a_row == 4


def test_a_part_stays_with_the_rest_that_the_workers_had(collector):
    policy = Tagged()
    collecting = collector(policy)
    collecting.update_policy_weights_({"layers.1": torch.full((4,), 3.0)})
    collecting.update_policy_weights_()
    for found in ask(collecting, "policy.read"):
        assert found["layers.1"].tolist() == [3] * 4 and found["layers.0"].tolist() == [0] * 4
    policy.set(4)
    collecting.update_policy_weights_()
    assert tags(collecting) == [4, 4]


def test_a_part_of_the_policy_itself_is_no_other_weights(collector):
    policy = Tagged()
    collecting = collector(policy)
    policy.set(3)
    collecting.update_policy_weights_(TensorDict.from_module(policy).select("tag"))
    collecting.update_policy_weights_()
    assert tags(collecting) == [3, 3]


def test_weights_that_were_refused_do_not_count(collector):
    policy = Tagged()
    collecting = collector(policy)
    policy.set(3)
    with pytest.raises(shmsync.ManifestMismatch):
        collecting.update_policy_weights_(Tagged(5, size=3))
    collecting.update_policy_weights_()
    assert tags(collecting) == [3, 3]


def test_an_update_that_changes_nothing_counts_as_one(collector):
    collecting = collector(Tagged())
    for update in range(4):
        collecting.update_policy_weights_(*[Tagged(5)] * (update == 0))
    assert next(iter(collecting))["policy_version"].unique().tolist() == [4]


def test_a_collector_of_one_process(collector):
    policy, critic = Tagged(), Critic(1)
    schemes = {"policy": ShmWeightSyncScheme(), "env.critic": ShmWeightSyncScheme()}
    environment = Steps()
    collecting = Collector(environment, policy, weight_sync_schemes=schemes, frames_per_batch=5, total_frames=-1)
    batches = iter(collecting)
    collecting.update_policy_weights_(Tagged(5))
    collecting.update_policy_weights_()
    collecting.update_policy_weights_(critic, model_id="env.critic")
    collecting.update_policy_weights_(model_id="env.critic")
    batch = next(batches)
    assert seen(batch).unique().tolist() == [5] and batch["next", "reward"].unique().tolist() == [1]
    policy.set(6)
    collecting.update_policy_weights_()
    assert seen(next(batches)).unique().tolist() == [6]
    collecting.shutdown()
