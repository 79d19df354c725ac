"""A scheme belongs to one collector: given to another one, at the same time or later, it raises an error."""

from __future__ import annotations

import gc
import pickle

import pytest
from torchrl.collectors import Collector, MultiSyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import parts
from support.torchrl.environments import Steps
from support.torchrl.policies import Tagged, seen

OPTIONS = {"frames_per_batch": 20, "total_frames": -1}
KINDS = [Collector, MultiSyncCollector]


def one_process(envs, *args, **options):
    """A Collector, which wants one environment where the others want a list."""
    return Collector(envs[0], *args, **{**options, "track_policy_version": False})


def refused(kind, scheme, error, match):
    """No collector can be made with it."""
    made = one_process if kind is Collector else kind
    with parts.starting(), pytest.raises(error, match=match):
        made([Steps] * 2, Tagged(5), weight_sync_schemes={"policy": scheme}, **OPTIONS)


@pytest.fixture
def start():
    with parts.collectors() as make:

        def start(kind, scheme, policy=None):
            kind = one_process if kind is Collector else kind
            return make(Tagged() if policy is None else policy, kind=kind, scheme=scheme)

        yield start


def tags_of(collecting):
    return seen(next(iter(collecting))).unique().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_that_was_shut_down_or_is_gone_took_its_scheme_along(kind):
    scheme = ShmWeightSyncScheme()
    made = one_process if kind is Collector else kind
    with parts.starting():
        collecting = made([Steps] * 2, Tagged(), weight_sync_schemes={"policy": scheme}, **OPTIONS)
    collecting.shutdown()
    refused(kind, scheme, shmsync.ProtocolError, "belongs to another")
    del collecting
    gc.collect()
    refused(kind, scheme, shmsync.ProtocolError, "belonged to a collector that is gone")


def test_a_copy_of_a_used_scheme_is_a_fresh_one(start):
    scheme = ShmWeightSyncScheme(timeout=20)
    collecting = start(MultiSyncCollector, scheme)
    again = pickle.loads(pickle.dumps(scheme))
    other = start(MultiSyncCollector, again)
    other.update_policy_weights_(Tagged(3))
    assert tags_of(other) == [3] and again.timeout == 20
    collecting.update_policy_weights_(Tagged(4))
    assert tags_of(collecting) == [4]
