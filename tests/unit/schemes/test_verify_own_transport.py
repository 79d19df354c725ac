"""verify() over a transport of the user's own: the question goes the way of the weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import shmsync
from shmsync.schemes import WeightSyncScheme


class Direct:
    """Hands pickled weights to a receiver in this process."""

    def __init__(self, receiver):
        self.receiver = receiver

    def send_weights(self, model_id, weights):
        self.receiver.apply_weights((model_id, pickle.loads(pickle.dumps(weights))))

    def receive_weights(self, timeout=1.0):
        return None


class DirectScheme(WeightSyncScheme):
    def create_transport(self, pipe_or_context):
        return Direct(pipe_or_context)


@pytest.fixture
def ends():
    """A sender, and the models of its two workers."""
    scheme = DirectScheme(checksum=True)
    trainer = nn.Linear(2, 2)
    scheme.init_on_sender("policy", model=trainer)
    sender, models = scheme.get_sender(), []
    for index in range(2):
        models.append(copy.deepcopy(trainer))
        worker = pickle.loads(pickle.dumps(scheme))
        worker.init_on_worker("policy", model=models[-1], pipe=object())
        sender.register_worker(index, worker.get_receiver())
    return sender, trainer, models


def test_what_was_sent_is_proved(ends):
    sender, trainer, _ = ends
    with torch.no_grad():
        trainer.weight.fill_(3)
    assert sender.send() == 1
    assert sender.verify() == (1, 2, (), (0, 1))
    assert sender.verify(1).workers == (1,)


def test_who_holds_something_else_is_named(ends):
    sender, _, models = ends
    sender.send()
    models[1].bias = nn.Parameter(torch.full((2,), 9.0))
    with pytest.raises(shmsync.NotDelivered, match="worker 1.*bias has other values") as error:
        sender.verify()
    assert (error.value.missing, error.value.leaves, error.value.version) == ([1], ("bias",), 1)
    sender.send()
    assert sender.verify().workers == (0, 1)


def test_weights_that_were_sent_under_the_keys_of_a_wrapper_are_proved(ends):
    sender, trainer, _ = ends
    sender.send(torch.compile(trainer, backend="eager").state_dict())
    assert sender.verify().workers == (0, 1)


def test_nothing_was_sent(ends):
    with pytest.raises(shmsync.ProtocolError, match="send.. first"):
        ends[0].verify()


def test_a_scheme_that_sends_nothing():
    scheme = shmsync.NoWeightSyncScheme()
    scheme.init_on_sender("policy")
    with pytest.raises(shmsync.ProtocolError, match="sends nothing"):
        scheme.get_sender().verify()
