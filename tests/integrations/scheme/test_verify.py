"""ShmWeightSyncScheme.verify(): every worker's policy holds what was sent to it, or the worker is named."""

import copy

import pytest
import torch
from torch import nn

import shmsync
from support.torchrl.pair import Counting, filled, net


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_what_was_sent_is_proved(pair, slots, apart):
    model = filled(net(), 1)
    both = pair(model, slots=slots, per_worker_weights=apart, checksum=True)
    for value in (2, 3):
        version = both.sender.send(filled(model, value))
        assert both.sender.verify() == (version, 9, (), (0, 1))
    assert both.sender.verify(1).workers == (1,)


def test_alias_and_extra_state(pair):
    model = filled(net(), 1)
    both = pair(model, alias=True, checksum=True)
    both.sender.send()
    assert both.sender.verify().workers == (0, 1)
    model = Counting()
    both = pair(model, checksum=True)
    both.sender.send(model)
    assert both.sender.verify().workers == (0, 1)


def test_weights_for_one_worker(pair):
    model = filled(net(), 1)
    both = pair(model, checksum=True)
    both.sender.send(filled(copy.deepcopy(model), 2), worker_ids=1)
    assert both.sender.verify().workers == (0, 1)


def set_data(own):
    own[0].weight.data = torch.full((4, 3), 77.0)


def replace(own):
    own[2] = nn.Linear(4, 2)


def write_buffer(own):
    own[1].running_mean.add_(1)


@pytest.mark.parametrize(("damage", "leaf"), [(set_data, "0.weight"), (replace, "2.weight"), (write_buffer, "1.run")])
def test_a_worker_that_holds_something_else_is_named(pair, damage, leaf):
    both = pair(filled(net(), 1), checksum=True)
    damage(both.models[1])
    with pytest.raises(shmsync.NotDelivered, match=leaf) as error:
        both.sender.verify()
    assert error.value.missing == [1]
    assert both.sender.verify([0]).workers == (0,)


def test_weights_that_a_worker_gave_itself(pair):
    both = pair(filled(net(), 1), checksum=True)
    both.receivers[0].apply_weights(filled(net(), 5).state_dict())
    with pytest.raises(shmsync.NotDelivered) as error:
        both.sender.verify()
    assert error.value.missing == [0]


def test_without_checksums(pair):
    both = pair(net())
    with pytest.raises(shmsync.ProtocolError, match="make it with checksum=True"):
        both.sender.verify()
