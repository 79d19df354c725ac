"""The scheme without a collector: pickled, registered, and used by hand on both sides."""

from __future__ import annotations

import pickle

import pytest
import torch
import torchrl
from tensordict import TensorDict
from torchrl.weight_update import WeightSyncScheme

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import until
from support.torchrl import policies
from support.torchrl.policies import Tagged


def values(module):
    return {float(value) for tensor in module.state_dict().values() for value in tensor.flatten()}


@pytest.fixture
def sender():
    """A scheme that sends to two workers, not connected yet."""
    scheme = ShmWeightSyncScheme(timeout=20, per_worker_weights=True)
    scheme.model_here = Tagged(1)
    scheme.init_on_sender(model=scheme.model_here, devices=[torch.device("cpu")] * 2, model_id="policy")
    yield scheme
    scheme.shutdown()


@pytest.fixture
def receiver():
    """receiver(sender, worker, model) -> a scheme as in a worker; here they are all in one process."""
    made = []

    def make(sender, worker, model, **options):
        scheme = pickle.loads(pickle.dumps(sender))
        made.append(scheme)
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker, **options)
        scheme.connect(worker_idx=worker)
        return scheme

    yield make
    for scheme in made:
        scheme.shutdown()
    until(lambda: policies.receiving_threads() == 0)  # it ends when no receiver is left


@pytest.mark.skipif(torchrl.__version__.startswith("0.13"), reason="TorchRL 0.13 has no registry")
def test_it_is_registered_by_name():
    scheme = WeightSyncScheme.from_backend("shmsync", slots=2, timeout=3.0)
    assert type(scheme) is ShmWeightSyncScheme and (scheme.slots, scheme.timeout) == (2, 3.0)
    assert type(WeightSyncScheme.from_backend("shared")) is not ShmWeightSyncScheme


def test_a_scheme_that_was_pickled_twice_works_as_well(sender, receiver):
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(sender))))
    assert again.timeout == 20 and not again.initialized_on_sender and not again.initialized_on_receiver
    sender.connect()
    models = [Tagged(), Tagged()]
    receiver(again, 0, models[0])
    receiver(pickle.loads(pickle.dumps(again)), 1, models[1])
    assert [values(model) for model in models] == [{1}, {1}]
    sender.send(Tagged(2))
    assert [values(model) for model in models] == [{2}, {2}]


def test_to_send_it_must_be_initialised_and_connected(sender):
    fresh = ShmWeightSyncScheme()
    with pytest.raises(RuntimeError, match="init_on_sender"):
        fresh.send(Tagged())
    with pytest.raises(RuntimeError, match=r"connect\(\)"):
        sender.send(Tagged())
    with pytest.raises(RuntimeError, match="receiver"):
        sender.receive()
    sender.connect()
    with pytest.raises(RuntimeError, match="twice"):
        sender.connect()


def test_a_worker_whose_trainer_is_gone_says_so(sender):
    scheme = pickle.loads(pickle.dumps(sender))
    sender.shutdown()
    scheme.init_on_receiver(model_id="policy", model=Tagged(), worker_idx=0)
    with pytest.raises(ConnectionError, match="does not reach its trainer"):
        scheme.connect(worker_idx=0)


def test_setting_the_model_binds_the_new_one(sender, receiver):
    sender.connect()
    first, second = Tagged(), Tagged()
    scheme = receiver(sender, 0, first)
    scheme.model = second
    assert scheme.model is second and values(second) == {1}
    sender.send(Tagged(2), worker_ids=0)
    assert values(second) == {2} and values(first) == {1}  # the first keeps what it has
    first.set(5)
    assert policies.seen(first(TensorDict({"observation": torch.zeros(1)}))) == 5  # and is its own again
    with pytest.raises(shmsync.ManifestMismatch):
        scheme.model = Tagged(size=9)
    sender.send(Tagged(3), worker_ids=0)
    assert values(second) == {3}
    scheme.model = torch.compile(second)  # a wrapper of what is bound
    sender.send(Tagged(4), worker_ids=0)
    assert values(second) == {4}


def test_a_worker_that_never_came_is_late(sender, receiver):
    sender.connect()
    receiver(sender, 0, Tagged())
    with pytest.raises(shmsync.AckTimeout) as caught:
        sender.send(Tagged(2), timeout=0.5)
    assert caught.value.missing == [1]
    late = Tagged()
    receiver(sender, 1, late)
    assert values(late) == {2}
    sender.send(Tagged(3))
    assert values(late) == {3}
