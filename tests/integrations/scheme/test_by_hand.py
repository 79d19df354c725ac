"""The scheme without a collector: pickled, registered, and used by hand on both sides."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torchrl
from tensordict import TensorDict
from torchrl.weight_update import WeightSyncScheme

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.calls import Call
from support.processes import segments, until, until_waits
from support.torchrl import policies, probes
from support.torchrl.policies import Tagged


def values(module):
    return {float(value) for tensor in module.state_dict().values() for value in tensor.flatten()}


@pytest.fixture
def sender():
    """A scheme that sends to two workers, not connected yet."""
    scheme = ShmWeightSyncScheme(timeout=20)
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
    until(lambda: "shmsync" not in probes.thread_names())  # it ends when no receiver is left


@pytest.mark.skipif(torchrl.__version__.startswith("0.13"), reason="TorchRL 0.13 has no registry")
def test_it_is_registered_by_name():
    scheme = WeightSyncScheme.from_backend("shmsync", slots=2, timeout=3.0)
    assert type(scheme) is ShmWeightSyncScheme and (scheme.slots, scheme.timeout) == (2, 3.0)
    assert type(WeightSyncScheme.from_backend("shared")) is not ShmWeightSyncScheme


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="strategy"):
        ShmWeightSyncScheme("pigeon")


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


def test_its_options_are_pickled():
    again = pickle.loads(pickle.dumps(ShmWeightSyncScheme(sync=False, slots=2, timeout=3.0)))
    assert (again.sync, again.slots, again.timeout) == (False, 2, 3.0)


def test_its_state_stays_the_same_when_it_is_taken_again(sender):
    first = sender.__getstate__()
    assert sender.__getstate__() == first
    other = ShmWeightSyncScheme()
    other.__setstate__(first)
    assert other.__getstate__() == first == other.__getstate__()
    pickle.dumps(first)
    assert sender.initialized_on_sender  # taking it changes nothing


def test_a_sender_that_is_made_a_receiver_forgets_that_it_sent(sender):
    """As TorchRL does when both are in one process: __setstate__(__getstate__())."""
    sender.init_on_receiver(model_id="policy", model=Tagged(), worker_idx=0)
    assert sender.initialized_on_receiver and not sender.initialized_on_sender


def test_initialising_again_forgets_the_first_time(sender, receiver):
    stale = pickle.loads(pickle.dumps(sender))
    sender.init_on_sender(model=Tagged(5), devices=[torch.device("cpu")], model_id="policy")
    sender.connect()
    assert len(segments()) == 1
    model = Tagged()
    receiver(sender, 0, model)
    assert values(model) == {5}
    stale.init_on_receiver(model_id="policy", model=Tagged(), worker_idx=0)
    with pytest.raises(ConnectionError):
        stale.connect(worker_idx=0)


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


def test_to_receive_it_must_be_initialised_and_connected(sender):
    scheme = pickle.loads(pickle.dumps(sender))
    with pytest.raises(RuntimeError, match="receiver"):
        scheme.receive()
    with pytest.raises(RuntimeError, match="receiver"):
        scheme.apply_weights(Tagged(1))
    scheme.init_on_receiver(model_id="policy", model=Tagged(), worker_idx=0)
    with pytest.raises(RuntimeError, match="receiver"):
        scheme.receive()


def test_a_scheme_that_the_trainer_never_initialised_cannot_receive():
    scheme = pickle.loads(pickle.dumps(ShmWeightSyncScheme()))
    scheme.init_on_receiver(model_id="policy", model=Tagged(), worker_idx=0)
    with pytest.raises(RuntimeError, match="not initialised in the trainer"):
        scheme.connect(worker_idx=0)


def test_a_worker_whose_trainer_is_gone_says_so(sender):
    scheme = pickle.loads(pickle.dumps(sender))
    sender.shutdown()
    scheme.init_on_receiver(model_id="policy", model=Tagged(), worker_idx=0)
    with pytest.raises(ConnectionError, match="does not reach its trainer"):
        scheme.connect(worker_idx=0)


def test_a_worker_waits_for_a_trainer_that_connects_later(sender, receiver):
    model = Tagged()
    waiting = Call(receiver, sender, 0, model)
    until_waits(waiting, "connect")
    assert values(model) == {0}
    sender.model_here.set(4)
    sender.connect()
    waiting.result()
    assert values(model) == {4}


def test_meta_parameters_become_real(sender, receiver):
    """A collector hands its policy to workers on the meta device."""
    sender.connect()
    model = Tagged().to("meta")
    receiver(sender, 0, model)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert values(model) == {1}


def test_connect_with_weights_waits_for_nobody():
    scheme = ShmWeightSyncScheme(timeout=1.0)
    scheme.init_on_sender(model=Tagged(), devices=["cpu", "cpu"], model_id="policy")
    try:
        scheme.connect(weights=Tagged(6))
        assert set(scheme.weights.flatten_keys(".").keys()) == {"layers.0", "layers.1", "tag"}
        assert all((weight == 6).all() for weight in scheme.weights.values(True, True))
    finally:
        scheme.shutdown()


def test_receive_moves_to_newer_weights_and_returns_them(sender, receiver):
    sender.connect()
    scheme = receiver(sender, 0, Tagged())
    assert scheme.receive() is None
    assert scheme.receive(timeout=0.05) is None
    sender.send(Tagged(2), worker_ids=[0])
    assert all((weight == 2).all() for weight in scheme.weights.values(True, True))
    assert values(scheme.model) == {2}


def test_weights_can_be_applied_without_a_trainer():
    scheme = ShmWeightSyncScheme()
    model = Tagged()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    scheme.apply_weights(Tagged(3).state_dict())
    assert values(model) == {3}


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


def test_a_copy_of_a_workers_policy_is_a_plain_one(sender, receiver):
    sender.connect()
    model = Tagged()
    receiver(sender, 0, model)
    clones = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    sender.send(Tagged(2), worker_ids=0)
    for clone in clones:
        assert values(clone) == {1}
        clone.set(3)
        frame = clone(TensorDict({"observation": torch.zeros(1)}))
        assert policies.seen(frame) == 3
    assert values(model) == {2}


def test_there_is_no_transport():
    with pytest.raises(NotImplementedError, match="no transport"):
        ShmWeightSyncScheme().create_transport()


def test_a_worker_that_never_came_is_late(sender, receiver):
    sender.connect()
    receiver(sender, 0, Tagged())
    with pytest.raises(shmsync.AckTimeout) as caught:
        sender.send(Tagged(2), timeout=0.3)
    assert caught.value.missing == [1]
    late = Tagged()
    receiver(sender, 1, late)
    assert values(late) == {2}
    sender.send(Tagged(3))
    assert values(late) == {3}
