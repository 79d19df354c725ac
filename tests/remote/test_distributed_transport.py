"""DistributedTransport in the documented loop, over a TCPStore and gloo, and what it leaves in the store."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shmsync
from shmsync import DistributedTransport, ManifestMismatch
from support.remote import fleet as parts
from support.remote.fleet import FOR_EVER, linear


def use(state, call, *args, **kwargs):
    return getattr(state.transport, call)(*args, **kwargs)


def open_transport(state, rank, **options):
    state.transport = DistributedTransport(state.store, rank, **options)


def wait_in_vain(state):
    """wait_ack(), for 0.2 seconds."""
    state.transport.timeout = 0.2
    try:
        state.transport.wait_ack()
    finally:
        state.transport.timeout = FOR_EVER


def send_sample(state, value, call="send_weights"):
    weights = linear(value).state_dict()
    getattr(state.transport, call)(*(("env.value_net",) if call != "send_initial_weights" else ()), weights)


def documented_loop(state, count, blocking, word="updated"):
    """What a collector's worker does: it waits for the instruction in the store, then receives and answers."""
    found, (into, out) = [], ("NODE_1_in", "NODE_1_out")
    while len(found) < count:
        if not (blocking or state.store.check([into])):
            continue
        instruction = state.store.get(into)
        state.store.delete_key(into)
        assert instruction == b"update_weights"
        model_id, weights = state.transport.receive_weights()
        found.append((model_id, sorted(weights), {float(t.min()) for t in weights.values()}))
        if blocking:
            state.transport.send_ack(word)
        else:
            state.store.set(out, word)
    return found


def receive_into(state, how):
    """(is what was returned what was given, what is in it)."""
    target = linear() if how == "model" else {name: t.clone() for name, t in linear().state_dict().items()}
    returned = state.transport.receive_weights(FOR_EVER, **{how: target})
    state.transport.send_ack()
    tensors = target.state_dict() if how == "model" else target
    return returned is target, {float(each.min()) for each in tensors.values()}


def receive_what_does_not_fit(state):
    """The error's name."""
    try:
        state.transport.receive_weights(FOR_EVER, model=nn.Linear(3, 3))
    except ManifestMismatch as error:
        return type(error).__name__


def receive_initial(state):
    return {float(each.min()) for each in state.transport.receive_initial_weights().values()}


def own_send(state, tag):
    dist.send(torch.full((4,), float(tag)), 1, tag=tag)


def own_receive(state, tag):
    found = torch.zeros(4)
    dist.recv(found, 0, tag=tag)
    return found[0].item()


@pytest.fixture
def ends(fleet):
    """(trainer, worker), with a transport each."""
    group = fleet("distributed", 1)
    both = group.trainer, *group.workers
    for process in both:
        process.call(open_transport, 1, timeout=parts.FOR_EVER)
    return both


@pytest.mark.parametrize("blocking", [True, False])
def test_a_loop_that_looks_for_the_documented_keys(ends, blocking):
    trainer, worker = ends
    worker.start(documented_loop, 2, blocking)
    for value in (1.0, 2.0):
        trainer.call(send_sample, value)
    expected = [("env.value_net", ["bias", "weight"], {value}) for value in (1.0, 2.0)]
    assert worker.result() == expected
    assert not any(trainer.call(parts.store, "check", [f"NODE_1_{key}"]) for key in ("in", "out", "in_label"))


def test_another_word_than_updated_is_a_runtime_error(ends):
    trainer, worker = ends
    worker.start(documented_loop, 1, True, "shutdown")
    with pytest.raises(RuntimeError, match="'shutdown'"):
        trainer.call(send_sample, 1.0)


def test_words_of_a_loop_of_ones_own_stay_in_the_store(ends):
    trainer, worker = ends
    trainer.call(parts.store, "set", "NODE_1_in", b"shutdown")
    assert worker.call(use, "receive_weights", 0.2) is None
    assert trainer.call(parts.store, "get", "NODE_1_in") == b"shutdown"


@pytest.mark.parametrize("how", ["weights", "model"])
def test_weights_are_received_into_what_is_there(ends, how):
    trainer, worker = ends
    trainer.start(send_sample, 5.0)
    assert worker.call(receive_into, how) == (how == "weights", {5.0})
    trainer.result()


def test_weights_that_do_not_fit_raise_at_both_ends_and_the_next_ones_come(ends):
    trainer, worker = ends
    trainer.start(send_sample, 1.0)
    assert worker.call(receive_what_does_not_fit) == "ManifestMismatch"
    with pytest.raises(shmsync.ManifestMismatch):
        trainer.result()
    trainer.start(send_sample, 2.0)
    assert worker.call(receive_into, "model")[1] == {2.0}
    trainer.result()


def test_bytes_that_nobody_took_are_not_taken_for_the_next_ones(ends):
    """Another transport knows nothing of the message that the first one gave up."""
    trainer, worker = ends
    trainer.call(send_sample, 1.0, "send_weights_async")
    with pytest.raises(shmsync.AckTimeout):
        trainer.call(wait_in_vain)
    trainer.call(open_transport, 1, timeout=parts.FOR_EVER)
    for value in (2.0, 3.0):
        trainer.call(send_sample, value, "send_weights_async")  # it is announced when the worker looks
        assert worker.call(receive_into, "weights")[1] == {value}
        trainer.call(use, "wait_ack")


def test_initial_weights_do_not_use_the_store(ends):
    trainer, worker = ends
    before = trainer.call(parts.store, "num_keys")
    for value in (1.0, 2.0):
        trainer.call(send_sample, value, "send_initial_weights")
        assert worker.call(receive_initial) == {value}
    assert trainer.call(parts.store, "num_keys") == before


def test_a_second_answer_to_a_message_is_not_that_to_the_next(ends):
    trainer, worker = ends
    trainer.start(send_sample, 1.0)
    worker.call(receive_into, "weights")
    trainer.result()
    worker.call(use, "send_ack")
    trainer.call(send_sample, 2.0, "send_weights_async")
    with pytest.raises(shmsync.AckTimeout):
        trainer.call(wait_in_vain)
    worker.call(receive_into, "weights")


def test_a_programs_own_messages_do_not_meet_those_of_a_send(ends):
    """Not with a probe either, which is sent while an answer is awaited."""
    trainer, worker = ends
    trainer.call(send_sample, 1.0, "send_weights_async")
    with pytest.raises(shmsync.AckTimeout):
        trainer.call(wait_in_vain)
    for tag in range(8):
        worker.start(own_receive, tag)
        trainer.call(own_send, tag)
        assert worker.result() == tag
    worker.call(receive_into, "weights")
