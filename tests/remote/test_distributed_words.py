"""Words that a worker says to its sender, and messages to it: none is lost, however close they come."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

import shmsync
from support.remote import transports

SAMPLE = transports.SAMPLES["nothing"]  # no bytes to move: no process group is needed


@pytest.fixture
def store():
    return HashStore()


@pytest.fixture
def ends(store):
    """(trainer, worker): two transports over one store."""
    made = [shmsync.DistributedTransport(store=store, rank=1, timeout=10.0) for _ in range(2)]
    yield made
    for each in made:
        each.close()


def post(trainer, worker):
    """A message that has come, and was not answered."""
    trainer.send_weights_async("policy", SAMPLE())
    assert worker.receive_weights() is not None


def test_two_words_back_to_back(ends):
    trainer, worker = ends
    for _ in range(3):
        post(trainer, worker)
        worker.send_ack("updated")
        worker.send_ack("done")
        trainer.wait_ack()
        trainer.check_ack("done")
    post(trainer, worker)
    worker.send_ack("updated")
    trainer.check_ack("updated")
    post(trainer, worker)
    worker.send_ack("updated")
    with pytest.raises(RuntimeError, match="'updated'"):
        trainer.check_ack("done")


def test_words_come_in_the_order_in_which_they_were_said(ends):
    trainer, worker = ends
    for word in ("one", "one", "two", "three"):
        worker.send_ack(word)
    for _ in range(2):
        trainer.check_ack("one")
    with pytest.raises(RuntimeError, match="'two'"):
        trainer.check_ack("three")
    trainer.check_ack("three")
    with pytest.raises(shmsync.AckTimeout):
        trainer.check_ack("three", timeout=0.1)
    worker.send_ack("three")
    trainer.check_ack("three")  # the call that gave up has not taken it
    with pytest.raises(TypeError, match="3"):
        trainer.check_ack(3)


def test_bytes_need_a_process_group(ends):
    trainer, worker = ends
    with pytest.raises(shmsync.ProtocolError, match="init_process_group"):
        trainer.send_weights("policy", transports.SAMPLES["flat"]())
    assert worker.receive_weights(0) is None


def test_a_late_answer_is_no_word(ends):
    trainer, worker = ends
    post(trainer, worker)
    with pytest.raises(shmsync.AckTimeout):
        trainer.wait_ack(timeout=0.05)
    worker.send_ack("updated")
    worker.send_ack("done")
    trainer.check_ack("done")
    post(trainer, worker)  # and the next send is answered by its own answer
    worker.send_ack()
    trainer.wait_ack()


def test_the_word_failed_says_no_more_than_that(ends):
    trainer, worker = ends
    post(trainer, worker)
    worker.send_ack("failed")
    with pytest.raises(RuntimeError, match="'failed'"):
        trainer.wait_ack()
