"""DistributedTransport in the documented loop, over a TCPStore and gloo, and what it leaves in the store."""

from __future__ import annotations

import pytest

import shmsync
from support.remote import fleet as parts


@pytest.fixture
def ends(fleet):
    """(trainer, worker), with a transport each."""
    group = fleet("distributed", 1)
    both = group.trainer, *group.workers
    for process in both:
        process.call(parts.open_transport, 1, timeout=parts.FOR_EVER)
    return both


@pytest.mark.parametrize("blocking", [True, False])
def test_a_loop_that_looks_for_the_documented_keys(ends, blocking):
    trainer, worker = ends
    worker.start(parts.documented_loop, 2, blocking)
    for value in (1.0, 2.0):
        trainer.call(parts.send_sample, value)
    expected = [("env.value_net", ["bias", "weight"], {value}) for value in (1.0, 2.0)]
    assert worker.result() == expected
    assert not any(trainer.call(parts.store, "check", [f"NODE_1_{key}"]) for key in ("in", "out", "in_label"))


def test_another_word_than_updated_is_a_runtime_error(ends):
    trainer, worker = ends
    worker.start(parts.documented_loop, 1, True, "shutdown")
    with pytest.raises(RuntimeError, match="'shutdown'"):
        trainer.call(parts.send_sample, 1.0)


def test_words_of_a_loop_of_ones_own_stay_in_the_store(ends):
    trainer, worker = ends
    trainer.call(parts.store, "set", "NODE_1_in", b"shutdown")
    assert worker.call(parts.use, "receive_weights", 0.2) is None
    assert trainer.call(parts.store, "get", "NODE_1_in") == b"shutdown"


@pytest.mark.parametrize("how", ["weights", "model"])
def test_weights_are_received_into_what_is_there(ends, how):
    trainer, worker = ends
    trainer.start(parts.send_sample, 5.0)
    assert worker.call(parts.receive_into, how) == (how == "weights", {5.0})
    trainer.result()


def test_weights_that_do_not_fit_raise_at_both_ends_and_the_next_ones_come(ends):
    trainer, worker = ends
    trainer.start(parts.send_sample, 1.0)
    assert worker.call(parts.receive_what_does_not_fit) == "ManifestMismatch"
    with pytest.raises(shmsync.ManifestMismatch):
        trainer.result()
    trainer.start(parts.send_sample, 2.0)
    assert worker.call(parts.receive_into, "model")[1] == {2.0}
    trainer.result()


def test_bytes_that_nobody_took_are_not_taken_for_the_next_ones(ends):
    """Another transport knows nothing of the message that the first one gave up."""
    trainer, worker = ends
    trainer.call(parts.send_sample, 1.0, "send_weights_async")
    with pytest.raises(shmsync.AckTimeout):
        trainer.call(parts.wait_in_vain)
    trainer.call(parts.open_transport, 1, timeout=parts.FOR_EVER)
    for value in (2.0, 3.0):
        trainer.start(parts.send_sample, value)
        assert worker.call(parts.receive_into, "weights")[1] == {value}
        trainer.result()


def test_initial_weights_do_not_use_the_store(ends):
    trainer, worker = ends
    before = trainer.call(parts.store, "num_keys")
    for value in (1.0, 2.0):
        trainer.call(parts.send_sample, value, "send_initial_weights")
        assert worker.call(parts.receive_initial) == {value}
    assert trainer.call(parts.store, "num_keys") == before


def test_a_second_answer_to_a_message_is_not_that_to_the_next(ends):
    trainer, worker = ends
    trainer.start(parts.send_sample, 1.0)
    worker.call(parts.receive_into, "weights")
    trainer.result()
    worker.call(parts.use, "send_ack")
    trainer.call(parts.send_sample, 2.0, "send_weights_async")
    with pytest.raises(shmsync.AckTimeout):
        trainer.call(parts.wait_in_vain)
    worker.call(parts.receive_into, "weights")


def test_a_programs_own_messages_do_not_meet_those_of_a_send(ends):
    """Not with a probe either, which is sent while an answer is awaited."""
    trainer, worker = ends
    trainer.call(parts.send_sample, 1.0, "send_weights_async")
    with pytest.raises(shmsync.AckTimeout):
        trainer.call(parts.wait_in_vain)
    for tag in range(8):
        worker.start(parts.own_receive, tag)
        trainer.call(parts.own_send, tag)
        assert worker.result() == tag
    worker.call(parts.receive_into, "weights")
