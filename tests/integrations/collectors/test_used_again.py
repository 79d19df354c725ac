"""A scheme serves one collector of worker processes: the second one that connects it raises an error."""

from __future__ import annotations

import pickle

import pytest
from torchrl.collectors import MultiSyncCollector

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import parts
from support.torchrl.environments import Steps
from support.torchrl.policies import Tagged, seen

OPTIONS = {"frames_per_batch": 20, "total_frames": -1}


@pytest.fixture
def start():
    with parts.collectors() as make:
        yield lambda kind, scheme: make(Tagged(), kind=kind, scheme=scheme)


def tags_of(collecting):
    return seen(next(iter(collecting))).unique().tolist()


def test_a_second_collector_is_refused(start):
    scheme = ShmWeightSyncScheme()
    collecting = start(MultiSyncCollector, scheme)
    with parts.starting(), pytest.raises(RuntimeError, match="twice"):
        MultiSyncCollector([Steps] * 2, Tagged(5), weight_sync_schemes={"policy": scheme}, **OPTIONS)
    collecting.update_policy_weights_(Tagged(4))
    assert tags_of(collecting) == [4]


def test_a_copy_of_a_used_scheme_is_a_fresh_one(start):
    scheme = ShmWeightSyncScheme(timeout=20)
    collecting = start(MultiSyncCollector, scheme)
    again = pickle.loads(pickle.dumps(scheme))
    other = start(MultiSyncCollector, again)
    other.update_policy_weights_(Tagged(3))
    assert tags_of(other) == [3] and again.timeout == 20
    collecting.update_policy_weights_(Tagged(4))
    assert tags_of(collecting) == [4]
