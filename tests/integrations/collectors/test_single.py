"""A Collector of one process: it is its own worker."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import segments
from support.torchrl import probes
from support.torchrl.environments import Steps
from support.torchrl.policies import Tagged, seen

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


def test_every_form_of_weights_is_used_by_the_next_frame(collector):
    collecting = collector(Tagged())
    batches = iter(collecting)
    assert seen(next(batches)).tolist() == [0] * 10
    for number, (name, form) in enumerate(FORMS.items(), 1):
        collecting.update_policy_weights_(form(Tagged(number + 5)))
        batch = next(batches)
        assert seen(batch).tolist() == [number + 5] * 10, name
        assert batch["next", "policy_version"].tolist() == batch["policy_version"].tolist() == [number] * 10


OPTIONS = [
    {},
    {"policy_device": "cpu"},
    {"use_buffers": False},
    {"track_policy_version": PolicyVersion("uuid")},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_frame_gives_the_version_that_made_it(collector, options):
    """Updates between two batches; also several of them, and one that fails."""
    collecting = collector(Tagged(), **options)
    batches, sent, given = iter(collecting), 0, {}
    for updates in (0, 1, 1, 0, 3, 1):
        for _ in range(updates):
            sent += 1
            collecting.update_policy_weights_(Tagged(sent))
            with pytest.raises(shmsync.ManifestMismatch):
                collecting.update_policy_weights_({"layers.0": torch.ones(5)})
        given[sent] = collecting.policy_version
        batch = next(batches)
        for frame in batch.reshape(-1).unbind(0):
            assert frame["policy_version"] == frame["next", "policy_version"] == given[sent]
            assert int(frame["tag"]) == int(frame["last"]) == sent
    assert len(set(given.values())) == 5


def test_it_starts_no_thread_and_maps_nothing(collector):
    collecting = collector(Tagged())
    collecting.update_policy_weights_(Tagged(1))
    assert "shmsync" not in probes.thread_names()
    assert segments() == []
