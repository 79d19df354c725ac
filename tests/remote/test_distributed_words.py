"""Words that a worker says over the store, and messages to it: none is lost, however close they come."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore, PrefixStore

import shmsync
from shmsync.schemes.remote.distributed.store_channel import Mailbox
from support.processes import until
from support.remote import transports

SAMPLE = transports.SAMPLES["nothing"]  # no bytes to move: the store alone carries it


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


def test_two_words_back_to_back(ends):
    trainer, worker = ends
    for _ in range(3):
        trainer.send_weights_async("policy", SAMPLE())
        assert worker.receive_weights() is not None
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
    trainer.send_weights_async("policy", SAMPLE())
    assert worker.receive_weights() is not None
    worker.send_ack("updated")
    worker.send_ack("done")
    with pytest.raises(RuntimeError, match="'updated'"):
        trainer.check_ack("done")
    trainer.check_ack("done")


@pytest.mark.parametrize("when", ["before", "after"])
def test_words_of_send_ack_and_of_a_loop_of_the_users_own(ends, store, when):
    trainer, worker = ends
    if when == "after":
        trainer.send_weights_async("policy", SAMPLE())
        assert worker.receive_weights() is not None
        worker.send_ack()
        trainer.wait_ack()
    store.set("NODE_1_out", "saved")
    trainer.check_ack("saved")
    assert not store.check(["NODE_1_out"])


def test_a_late_answer_is_no_word(ends):
    trainer, worker = ends
    trainer.send_weights_async("policy", SAMPLE())
    assert worker.receive_weights() is not None
    with pytest.raises(shmsync.AckTimeout):
        trainer.wait_ack(timeout=0.05)
    worker.send_ack("updated")
    worker.send_ack("done")
    trainer.check_ack("done")
    trainer.send_weights_async("policy", SAMPLE())  # and the next send is answered by its own answer
    assert worker.receive_weights() is not None
    worker.send_ack()
    trainer.wait_ack()


def test_the_word_failed_says_no_more_than_that(ends):
    trainer, worker = ends
    trainer.send_weights_async("policy", SAMPLE())
    assert worker.receive_weights() is not None
    worker.send_ack("failed")
    with pytest.raises(RuntimeError, match="'failed'"):
        trainer.wait_ack()


def test_an_announcement_waits_for_a_word_that_the_users_own_loop_has_not_read(ends, store):
    trainer, worker = ends
    store.set("NODE_1_in", "evaluate")
    trainer.send_weights_async("policy", SAMPLE())
    assert store.get("NODE_1_in") == b"evaluate"
    store.delete_key("NODE_1_in")  # the loop reads it, and waits for what comes next
    until(lambda: trainer.busy and store.check(["NODE_1_in"]))  # each question is a look
    assert store.get("NODE_1_in") == b"update_weights"
    assert worker.receive_weights() is not None
    worker.send_ack()
    trainer.wait_ack()


def test_what_ends_a_relay_is_not_lost_to_the_next_message(store):
    mailbox = Mailbox(PrefixStore("of the scheme", store), 1)
    mailbox.put_message({"serial": "a", "close": "a session", "ended": True})
    mailbox.put_message({"serial": "b"})  # of a new sender
    mailbox.put_message({"serial": "c"})  # it takes the place of the one before, which nobody took
    taken = []
    while (message := mailbox.take_message(listen=False)) is not None:
        taken.append(message["serial"])
    assert taken == ["a", "c"]
