"""Words that a worker says to its sender, and messages to it: none is lost, however close they come."""

from __future__ import annotations

import contextlib

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


def test_a_word_before_the_answer(ends):
    trainer, worker = ends
    trainer.send_weights_async("policy", SAMPLE())
    worker.send_ack("ready")
    assert worker.receive_weights() is not None
    worker.send_ack()
    trainer.wait_ack()
    trainer.check_ack("ready")


def test_the_same_word_again_and_again(ends):
    trainer, worker = ends
    for _ in range(3):
        worker.send_ack("done")
    for _ in range(3):
        trainer.check_ack("done")
    with pytest.raises(shmsync.AckTimeout):
        trainer.check_ack("done", timeout=0.1)


def test_words_come_in_the_order_in_which_they_were_said(ends):
    trainer, worker = ends
    for word in ("one", "two", "three"):
        worker.send_ack(word)
    trainer.check_ack("one")
    with pytest.raises(RuntimeError, match="'two'"):
        trainer.check_ack("three")
    trainer.check_ack("three")


def test_a_wait_for_another_word_leaves_the_next_one(ends):
    trainer, worker = ends
    post(trainer, worker)
    worker.send_ack("updated")
    worker.send_ack("done")
    with pytest.raises(RuntimeError, match="'updated'"):
        trainer.check_ack("done")
    trainer.check_ack("done")


@pytest.mark.parametrize("word", ["updated", "done"])
def test_check_ack_expects_the_word_that_it_is_given(ends, word):
    trainer, worker = ends
    for expected in (word, "another"):
        post(trainer, worker)
        worker.send_ack(word)
        with contextlib.nullcontext() if expected == word else pytest.raises(RuntimeError, match=repr(word)):
            trainer.check_ack(expected)
    with pytest.raises(TypeError, match="3"):
        trainer.check_ack(3)


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
