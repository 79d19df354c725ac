"""A scheme belongs to one collector: given to another one, at the same time or later, it raises an error."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import segments
from support.torchrl import parts
from support.torchrl.environments import Steps
from support.torchrl.policies import Tagged, seen

OPTIONS = {"frames_per_batch": 20, "total_frames": -1}
KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]


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


def pickled(scheme):
    return pickle.loads(pickle.dumps(scheme))


def tags_of(collecting):
    return seen(next(iter(collecting))).unique().tolist()


@pytest.mark.full  # the tests around it use a scheme again
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_collector_is_refused_while_the_first_works_on(start, kind):
    scheme, first = ShmWeightSyncScheme(), Tagged()
    collecting = start(kind, scheme, first)
    refused(kind, scheme, shmsync.ProtocolError, f"belongs to another {kind.__name__}.*pickle.loads")
    collecting.update_policy_weights_(Tagged(7))
    assert tags_of(collecting) == [7]


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheme_that_was_shut_down_is_refused_before_a_process_is_started(start, kind):
    scheme = ShmWeightSyncScheme()
    start(kind, scheme)
    scheme.shutdown()
    refused(kind, scheme, shmsync.ClosedError, "shut down")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("copied", "shut"), [(copy.copy, False), (pickled, True)])
def test_a_copy_of_a_used_scheme_is_a_fresh_one(start, kind, copied, shut):
    scheme = ShmWeightSyncScheme(timeout=20)
    collecting = start(kind, scheme)
    if shut:
        collecting.shutdown()
        scheme.shutdown()
    again = copied(scheme)
    other = start(kind, again)
    other.update_policy_weights_(Tagged(3))
    assert tags_of(other) == [3] and again.timeout == 20
    if not shut:
        collecting.update_policy_weights_(Tagged(4))
        assert tags_of(collecting) == [4]


def test_a_scheme_that_was_initialised_by_hand_goes_to_one_collector(start):
    scheme = ShmWeightSyncScheme()
    scheme.init_on_sender(model=Tagged(), devices=["cpu", "cpu"], model_id="policy")
    collecting = start(MultiSyncCollector, scheme)
    assert scheme.initialized_on_sender and scheme.synchronized_on_sender
    refused(MultiSyncCollector, scheme, shmsync.ProtocolError, "belongs to another")
    collecting.update_policy_weights_(Tagged(2))
    assert tags_of(collecting) == [2]


def test_with_a_scheme_it_is_shut_down_at_the_end():
    with ShmWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=Tagged(), devices=["cpu"], model_id="policy")
        scheme.connect()
        assert len(segments()) == 1
    assert segments() == []
    for call in (
        scheme.send,
        scheme.connect,
        lambda: scheme.init_on_sender(model=Tagged(), devices=["cpu"], model_id="policy"),
    ):
        with pytest.raises(shmsync.ClosedError, match="shut down"):
            call()
