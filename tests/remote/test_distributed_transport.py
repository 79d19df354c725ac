"""DistributedTransport alone, between a trainer and a rank, and what it leaves in their store."""

from __future__ import annotations

import itertools

import pytest

import shmsync
from shmsync import DistributedTransport
from support.remote import parts, transports
from support.remote.members import FOR_EVER


@pytest.fixture
def ends(fleet):
    """(trainer, worker), with a transport each."""
    both = fleet(1).connect("distributed").everybody
    for worker in both:
        worker.call(transports.open_transport, 1, timeout=FOR_EVER)
    return both


def keys(worker):
    """Which of the keys there are."""
    return [key for key in ("NODE_1_in", "NODE_1_out") if worker.call(parts.store, "check", [key])]


def test_the_constructor_takes_keywords_alone():
    with pytest.raises(TypeError):
        DistributedTransport(None)
    transport = DistributedTransport(weights_buffer=None, store=None, rank=None, sync=True, timeout=3.0)
    assert (transport.store, transport.rank, transport.sync, transport.timeout) == (None, None, True, 3.0)
    with pytest.raises(ValueError, match="timeout"):
        DistributedTransport(timeout=-1)


def test_weights_arrive_as_they_were_sent(ends):
    trainer, worker = ends
    for name, model_id in zip(transports.SAMPLES, itertools.cycle(("policy", "env.value_net")), strict=False):
        trainer.start(transports.send_sample, name, model_id=model_id)
        assert worker.call(transports.receive_sample) == model_id
        trainer.result()
        assert worker.call(transports.differences, name) == [], name
        if name == "tied":
            assert worker.call(transports.shared_storages) == [["first", "second"]]


def test_weights_are_received_into_what_is_there(ends):
    trainer, worker = ends
    for how in ("weights=", "model=", "the buffer of the transport"):
        trainer.start(transports.send_sample, "flat")
        returned, in_place, values = worker.call(transports.receive_into, how)
        trainer.result()
        assert returned is (how != "model="), how
        assert in_place, how
        assert set(values.values()) == {5.0, 6.0}, how


def test_no_weights_within_the_timeout(ends):
    """Setting up the connection brings none."""
    trainer, worker = ends
    assert trainer.call(transports.use, "setup_connection_and_weights_on_sender") is None
    set_up = "setup_connection_and_weights_on_receiver"
    assert worker.call(transports.use, set_up, worker_idx=0, weights=None, model=None, strategy=None) is None
    assert trainer.call(transports.use, "check_connection")
    for timeout in (0, 0.1):
        assert worker.call(transports.use, "receive_weights", timeout) is None
    worker.call(transports.open_transport, 1, timeout=0.1)
    assert worker.call(transports.use, "receive_weights") is None  # the transport's own


def test_weights_that_do_not_fit_raise_at_both_ends_and_the_next_ones_come(ends):
    trainer, worker = ends
    for _ in range(2):
        trainer.start(transports.send_sample, "flat")
        error, weights = worker.call(transports.receive_what_does_not_fit)
        assert error == "ManifestMismatch"
        assert not any(map(any, weights))
        with pytest.raises(shmsync.ManifestMismatch) as caught:
            trainer.result()
        assert "in receive_weights" in str(caught.value.__cause__)


def test_a_word_for_somebody_else_is_left_in_the_store(ends):
    trainer, worker = ends
    trainer.call(parts.store, "set", "NODE_1_in", b"shutdown")
    assert worker.call(transports.use, "receive_weights", 0.2) is None
    assert trainer.call(parts.store, "get", "NODE_1_in") == b"shutdown"
    assert keys(trainer) == ["NODE_1_in"]  # and the worker did not answer it
    trainer.start(transports.send_sample, "flat")
    worker.call(transports.receive_sample)
    trainer.result()


def test_initial_weights_do_not_use_the_store(ends):
    trainer, worker = ends
    before = trainer.call(parts.store, "num_keys")
    for name in ("tensordict", "extra"):
        worker.start(transports.receive_initial)
        trainer.call(transports.send_sample, name, "send_initial_weights")
        worker.result()
        assert worker.call(transports.differences, name) == []
        assert trainer.call(parts.store, "num_keys") == before
    assert keys(trainer) == []


def test_a_late_answer_is_not_the_next_sends(ends):
    trainer, worker = ends
    trainer.call(transports.send_sample, "flat", "send_weights_async")
    worker.call(transports.received_without_answer)
    with pytest.raises(shmsync.AckTimeout):
        trainer.call(transports.use, "wait_ack", timeout=0.05)
    worker.call(transports.use, "send_ack")
    trainer.call(transports.send_sample, "flat", "send_weights_async")
    worker.call(transports.received_without_answer)
    with pytest.raises(shmsync.AckTimeout):
        trainer.call(transports.use, "wait_ack", timeout=0.3)
    worker.call(transports.use, "send_ack")
    trainer.start(transports.send_sample, "flat")
    worker.call(transports.receive_sample)
    trainer.result()
