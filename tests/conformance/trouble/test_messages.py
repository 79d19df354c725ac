"""Messages of the worker's own over the pipe of its weights, garbage, and models without a receiver."""

from __future__ import annotations

import multiprocessing
import os
import struct

import pytest

import shmsync
from shmsync.schemes import MPTransport, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.calls import Call, naming, overrun
from support.conformance.nets import Stamped, ask
from support.conformance.rigs import PipeRig

OWN = [
    (None, "ready"),
    ("frames", "done"),
    ("frames", "updated"),
    (("policy", 99), "updated"),  # never sent
    {"n": 10},
]
GARBAGE = struct.pack("!i", -5)  # a header that announces a message of a negative size


@pytest.fixture(params=[MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def rig(request, rig_of):
    return rig_of(PipeRig, request.param, timeout=60.0)


def test_a_message_of_the_workers_own_is_kept_at_any_moment_of_a_send(rig):
    theirs = rig.pipes[3]  # worker 1
    for value, own in enumerate(OWN, 1):
        theirs.send(own)
        rig.sender.send_async(Stamped(value))
        theirs.send(own)
        rig.receive()
        theirs.send(own)
        rig.sender.wait_async()
        assert rig.stamps() == [value] * 2
        assert list(map(str, rig.sender.pending(1))) == [str(own)] * 3


def test_a_message_of_the_trainers_own_is_kept_in_the_worker(rig):
    for value, message in enumerate([*OWN[:5], (("policy", "somewhere"), "register_shared_weights")], 1):
        rig.pipes[0].send(message)
        rig.deliver(Stamped(value))
        assert rig.receivers[0].pending() == [message]
        assert rig.stamps() == [value] * 2


def test_large_messages_of_the_workers_own_come_whole(pipe):
    ours = MPTransport(pipe[0])
    body = os.urandom(30 << 20)
    sending = Call(pipe[1].send, body)
    found = []
    while not found:
        assert ours.receive_weights(timeout=0.01) is None
        found = ours.pending()
    sending.result()
    assert found == [body]


def test_garbage_ends_a_pipe_and_the_others_go_on(rig):
    os.write(rig.pipes[1].fileno(), GARBAGE)  # worker 0
    with naming(shmsync.WorkerDied, [0], match="is no message"):
        rig.receive_until(Call(rig.sender.send, Stamped(3), timeout=60), [1])
    rig.receive_until(Call(rig.sender.send, Stamped(4), timeout=60), [1])
    assert rig.stamps()[1] == 4
    rig.workers.append(joined := rig.make_scheme())
    rig.nets[0] = Stamped(0)
    joined.init_on_worker("policy", model=rig.nets[0], **rig.connect())
    rig.sender.register_worker(0, rig.pipes[-2])
    rig.receivers[0] = joined.get_receiver()
    rig.receive_until(Call(rig.sender.send, Stamped(5), timeout=60))
    assert rig.stamps() == [5, 5]


@pytest.mark.parametrize("start", [struct.pack("!iQ", -1, 2**31) + b"garbage", b"\0\0"])
def test_half_a_message_and_then_silence_ends_at_the_deadline(rig, start):
    os.write(rig.pipes[1].fileno(), start)
    said, late = overrun(lambda: rig.sender.send(Stamped(7), timeout=0.2), 0.2)
    assert said == {"AckTimeout"} and late < 0.1


def test_garbage_from_the_sender_is_an_error_in_the_worker(rig):
    other, theirs = multiprocessing.Pipe()
    with other, theirs:
        os.write(other.fileno(), GARBAGE)
        scheme = rig.workers[0]
        scheme.init_on_worker("policy", pipe=theirs, model=Stamped(0))
        with pytest.raises(shmsync.WriterDied, match="is no message"):
            scheme.get_receiver().receive(0.05)
        scheme.get_receiver().close()


def test_a_receiver_that_is_made_later_serves_a_model_that_had_none(rig):
    other = rig.make_scheme()
    other.init_on_sender("valeu", **rig.addresses())
    rig.workers.append(other)
    with pytest.raises(shmsync.AckTimeout):
        rig.receive_until(Call(other.get_sender().send, Stamped(1), timeout=0.3))
    nets = [Stamped(0), Stamped(0)]
    for net, pipe in zip(nets, rig.pipes[1::2], strict=True):
        rig.workers.append(worker := rig.make_scheme())
        worker.init_on_worker("valeu", model=net, pipe=pipe)
        rig.receivers.append(worker.get_receiver())
    rig.receive_until(Call(other.get_sender().send, Stamped(5), timeout=60))
    assert list(map(ask, nets)) == [5, 5]
