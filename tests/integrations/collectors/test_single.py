"""A Collector of one process: it is its own worker."""

from __future__ import annotations

import copy
import threading
from concurrent import futures

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import segments
from support.torchrl import policies, probes
from support.torchrl.environments import Steps
from support.torchrl.policies import Acting, Remembering, Tagged, seen

FORMS = {
    "module": lambda policy: policy,
    "parameters": TensorDict.from_module,
    "tensordict": lambda policy: TensorDict.from_module(policy).data,
    "flat": lambda policy: TensorDict.from_module(policy).data.flatten_keys("."),
    "state dict": Tagged.state_dict,
}


@pytest.fixture
def collector():
    made = []

    def make(policy=None, **options):
        options = {"frames_per_batch": 10, "total_frames": -1, "track_policy_version": True, **options}
        schemes = {"policy": ShmWeightSyncScheme()}
        made.append(Collector(Steps(), policy, weight_sync_schemes=schemes, **options))
        return made[-1]

    yield make
    for collecting in made:
        collecting.shutdown()


@pytest.mark.parametrize("options", [{}, {"policy_device": "cpu"}, {"device": "cpu"}], ids=str)
def test_every_form_of_weights_is_used_by_the_next_frame(collector, options):
    collecting = collector(Tagged(), **options)
    batches = iter(collecting)
    assert seen(next(batches)).tolist() == [0] * 10
    for number, (name, form) in enumerate(FORMS.items(), 1):
        collecting.update_policy_weights_(form(Tagged(number + 5)))
        batch = next(batches)
        assert seen(batch).tolist() == [number + 5] * 10, name
        assert batch["next", "policy_version"].tolist() == batch["policy_version"].tolist() == [number] * 10


VERSIONS = {"int": lambda: True, "a tracker": PolicyVersion, "uuid": lambda: PolicyVersion("uuid")}


OPTIONS = [
    {},
    {"policy_device": "cpu"},
    {"env_device": "cpu"},
    {"storing_device": "cpu"},
    {"reset_at_each_iter": True},
    {"use_buffers": False},
    {"frames_per_batch": 7},
    {"split_trajs": True},
]


@pytest.mark.parametrize(
    ("options", "version"),
    [*((options, "int") for options in OPTIONS), *(({}, version) for version in VERSIONS if version != "int")],
    ids=str,
)
def test_each_frame_gives_the_version_that_made_it(collector, options, version):
    """Updates between two batches; also several of them, and one that fails."""
    collecting = collector(Tagged(), track_policy_version=VERSIONS[version](), **options)
    batches, sent, given = iter(collecting), 0, {}
    for updates in (0, 1, 1, 0, 3, 1):
        for _ in range(updates):
            sent += 1
            collecting.update_policy_weights_(Tagged(sent))
            with pytest.raises(shmsync.ManifestMismatch):
                collecting.update_policy_weights_({"layers.0": torch.ones(5)})
        given[sent] = collecting.policy_version
        batch = next(batches)
        whole = batch[batch["mask"]] if "mask" in batch else batch
        for frame in whole.reshape(-1).unbind(0):
            assert frame["policy_version"] == frame["next", "policy_version"] == given[sent]
            assert int(frame["tag"]) == int(frame["last"]) == sent
    assert len(set(given.values())) == 5


def test_its_environment_can_be_copied(collector):
    collecting = collector(Tagged())
    made = copy.deepcopy(collecting.env)
    assert made.rollout(3)["next", "policy_version"].tolist() == [0] * 3
    collecting.update_policy_weights_(Tagged(1))
    assert next(iter(collecting))["policy_version"].tolist() == [1] * 10
    assert made.rollout(3)["next", "policy_version"].tolist() == [0] * 3


def test_without_weights_it_takes_the_policys(collector):
    policy = Tagged()
    collecting = collector(policy)
    batches = iter(collecting)
    for update in (1, 2):
        policy.set(update)
        collecting.update_policy_weights_()
        batch = next(batches)
        assert seen(batch).tolist() == [update] * 10
        assert batch["next", "policy_version"].tolist() == batch["policy_version"].tolist() == [update] * 10


def test_a_partial_update_changes_what_it_names(collector):
    policy = Tagged()
    collecting = collector(policy)
    collecting.update_policy_weights_({"layers.0": torch.full((4,), 5.0)})
    assert policy.layers[0].tolist() == [5] * 4 and policy.layers[1].tolist() == [0] * 4


def test_extra_state(collector):
    policy = Acting(Remembering())
    collecting = collector(policy)
    collecting.update_policy_weights_(Acting(Remembering(["a", "b"])))
    assert policies.notes(policy) == [(2, ["a", "b"])]


def test_lazy_parameters(collector):
    policy = Acting(nn.LazyLinear(1))
    collecting = collector(policy)
    other = Acting(nn.Linear(1, 1))
    with torch.no_grad():
        other.module.weight.fill_(2), other.module.bias.fill_(3)
    collecting.update_policy_weights_(other)
    batch = next(iter(collecting))
    assert torch.equal(batch["action"], 2 * batch["observation"] + 3)


def test_it_starts_no_thread_and_maps_nothing(collector):
    collecting = collector(Tagged())
    collecting.update_policy_weights_(Tagged(1))
    assert "shmsync" not in probes.thread_names()
    assert segments() == []


class Halfway(Tagged):
    """Waits in the middle of each forward for a word."""

    def __init__(self):
        super().__init__()
        self.halfway, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()  # a collector runs its policy when it is made

    def forward(self, tensordict):
        first = self.layers[0].detach().clone()
        self.halfway.set()
        assert self.go_on.wait(60)
        return super().forward(tensordict).set("first", first.min() * torch.ones_like(tensordict["observation"]))


def test_an_update_from_another_thread_reaches_a_forward_under_way(collector):
    """Unlike in a worker process. The stamp is of the newer weights. The next forward uses none of the old ones."""
    policy = Halfway()
    collecting = collector(policy, frames_per_batch=1)
    batches = iter(collecting)
    policy.halfway.clear()
    policy.go_on.clear()
    with futures.ThreadPoolExecutor(1) as pool:
        batch = pool.submit(next, batches)
        assert policy.halfway.wait(60)
        collecting.update_policy_weights_(Tagged(1))  # waits for nothing
        policy.go_on.set()
        torn = batch.result(60)
    assert (torn["first"].item(), torn["last"].item(), torn["next", "policy_version"].item()) == (0, 1, 1)
    whole = next(batches)
    assert (whole["first"].item(), whole["last"].item(), whole["policy_version"].item()) == (1, 1, 1)
