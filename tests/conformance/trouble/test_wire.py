"""The messages on the pipes, for a program that reads and writes them without shmsync."""

import pytest
import torch

from shmsync.errors import AckTimeout
from shmsync.schemes import MPTransport, SharedMemTransport, WeightStrategy
from support.calls import Call
from support.conformance.nets import Stamped, ask
from support.conformance.table import MP, SHM, only


def raw_recv(state):
    """The next message, for a program without shmsync; tensors as lists."""

    def plain(value):
        if isinstance(value, tuple):
            return tuple(plain(inner) for inner in value)
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return plain(state.pipe.recv())


def raw_send(state, message):
    state.pipe.send(message)


def raw_attach(state):
    """Follow a registration by hand: what it says, and the first number of the weights that came with it."""
    (model_id, state.weights), word = state.pipe.recv()
    return model_id, word, int(state.weights["count"][0])


def raw_look(state):
    return int(state.weights["count"][0])


def raw_detach(state):
    state.weights = None


multi_process, shared_mem = only(MP), only(SHM)


def listed(module):
    return {key: tensor.tolist() for key, tensor in module.state_dict().items()}


@pytest.fixture
def fleet(fleet):
    """Workers that never receive by themselves."""
    fleet.hold()
    return fleet


def one_worker(fleet):
    """A sender to worker 0 alone."""
    scheme = fleet.make(timeout=60)
    fleet.init_sender(scheme, pipes=fleet.pipes[:1])
    return scheme.get_sender(), fleet.workers[0]


# ---- MultiProcessWeightSyncScheme


@multi_process
def test_mp_message_is_read_by_a_plain_recv_and_answered_by_a_plain_pair(fleet):
    sender, worker = one_worker(fleet)
    for value in (1, 2):
        assert sender.send_async(Stamped(value)) == value
        assert worker.call(raw_recv) == (("policy", listed(Stamped(value))), "update_weights")
        worker.call(raw_send, (None, "updated"))
        assert sender.wait_async() == value


@multi_process
def test_mp_plain_answers_count_for_the_oldest_message(fleet):
    sender, worker = one_worker(fleet)
    sender.send_async(Stamped(1))
    worker.call(raw_recv)
    with pytest.raises(AckTimeout):
        sender.wait_async(timeout=0.05)
    sender.send_async(Stamped(2))
    worker.call(raw_recv)
    worker.call(raw_send, (None, "updated"))  # this is for version 1
    with pytest.raises(AckTimeout):
        sender.wait_async(timeout=0.05)


# ---- MPTransport


def test_transports_speak_to_each_other(pipe):
    ours, theirs = MPTransport(pipe[0]), MPTransport(pipe[1])
    assert theirs.receive_weights(timeout=0.01) is None
    sending = Call(ours.send_weights, "policy", Stamped(1).state_dict())
    model_id, weights = theirs.receive_weights(timeout=60)
    net = Stamped()
    WeightStrategy().apply_weights(net, weights)
    assert (model_id, ask(net)) == ("policy", 1)
    assert sending.is_alive()  # not before the ack
    theirs.send_ack()
    sending.result()


@pytest.mark.parametrize("wanted", ["loaded", "updated"])
def test_check_ack_waits_for_its_word_and_refuses_another(pipe, wanted):
    ours, theirs = MPTransport(pipe[0]), MPTransport(pipe[1])
    ours.send_weights_async("policy", {})
    theirs.receive_weights(timeout=60)
    theirs.send_ack("loaded")
    if wanted == "loaded":
        ours.check_ack(wanted)
        assert ours.pending() == []
    else:
        with pytest.raises(RuntimeError, match="'loaded'"):
            ours.check_ack()
        assert ours.pending() == [(None, "loaded")]


@pytest.mark.parametrize("call", ["wait_ack", "check_ack"])
def test_no_answer_is_awaited_when_nothing_was_sent(pipe, call):
    ours, theirs = MPTransport(pipe[0]), MPTransport(pipe[1])
    theirs.send_ack("updated")
    with pytest.raises(RuntimeError, match=r"no send is pending; call send_weights_async\(\)"):
        getattr(ours, call)()


# ---- SharedMemWeightSyncScheme


@shared_mem
def test_shared_mem_registers_once_and_then_sends_small_tuples(fleet):
    sender, worker = one_worker(fleet)
    sender.send_async(Stamped(5))
    assert worker.call(raw_attach) == ("policy", "register_shared_weights", 5)
    worker.call(raw_send, (None, "registered"))
    assert worker.call(raw_recv) == (("policy", 1), "update_weights")
    worker.call(raw_send, (None, "updated"))
    assert sender.wait_async() == 1

    sender.send_async(Stamped(6))
    assert worker.call(raw_recv) == (("policy", 2), "update_weights")
    assert worker.call(raw_look) == 6
    worker.call(raw_send, (None, "updated"))
    assert sender.wait_async() == 2
    worker.call(raw_detach)


def test_shared_mem_transports_speak_to_each_other(pipe):
    ours, theirs = SharedMemTransport(), SharedMemTransport()
    theirs.pipe = pipe[1]
    ours.register_pipe(pipe[0])
    ours.send_weights_async("policy", Stamped(7).state_dict())
    model_id, weights = theirs.receive_weights(timeout=60)
    assert (model_id, weights["count"].tolist()) == ("policy", [7, 7, 7])
    theirs.send_ack()
    ours.wait_ack()
    with pytest.raises(RuntimeError, match="no send is pending"):
        ours.wait_ack()
    del weights
    theirs.close()
    ours.close()
