"""A worker's own messages over the pipe of its weights, garbage included, and models that it does not have."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import struct
import threading
import time

import pytest

import shmsync
from shmsync.schemes import MPTransport, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.calls import Call, naming
from support.conformance import calls_of_senders as calls
from support.conformance import peers
from support.conformance.nets import Stamped
from support.conformance.rigs import PipeRig
from support.conformance.table import in_processes, over_pipes

OWN = [(None, "ready"), ("frames", "done"), ("frames", "updated"), (("policy", 2), "registered"), {"n": 10}]


@in_processes
@over_pipes
@pytest.mark.parametrize("own", OWN, ids=str)
def test_a_message_of_the_workers_own_is_no_answer_at_any_moment_of_a_send(fleet, own):
    sender = fleet.open(timeout=60.0)
    fleet.hold(1)
    for value in (1, 2, 3):
        fleet.workers[1].call(peers.raw_send, own)  # before the message is sent
        sender.send_async(Stamped(value))
        fleet.workers[1].call(peers.raw_send, own)  # before it is received
        assert fleet.workers[1].call(peers.receive, timeout=60) is True
        fleet.workers[1].call(peers.raw_send, own)  # after the answer
        sender.wait_async()
        assert fleet.stamps() == [value] * 3
    assert sender.pending(1) == [own] * 9


@in_processes
@over_pipes
def test_a_worker_that_never_stops_talking_holds_no_send_up(fleet):
    sender = fleet.open(timeout=60.0)
    sender.send(Stamped(1))
    fleet.hold()
    fleet.workers[0].start(peers.talk)
    said, late = calls.overrun(sender, "send", 0.3)
    assert said == {"AckTimeout"} and late < 0.1


SCHEMES = [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme]
HEADERS = {
    "negative": struct.pack("!i", -5),
    "smallest": struct.pack("!i", -(2**31)),
    "longer than the memory": struct.pack("!iQ", -1, 2**62),
    "long and negative": struct.pack("!iq", -1, -7),
}


@pytest.fixture(params=SCHEMES)
def rig(request, rig_of):
    """Of one worker."""
    return rig_of(PipeRig, request.param, nets=[Stamped(0)], timeout=0.3)


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_no_message_has_is_an_error_that_names_the_worker(rig, header):
    for _ in range(2):  # the error is raised again until the worker is registered again
        rig.sender.send_async(Stamped(1))
        os.write(rig.pipes[1].fileno(), header)
        with naming(shmsync.ProtocolError, [0], match="worker 0 has sent bytes that are no message"):
            rig.sender.wait_async(timeout=60)


@pytest.mark.parametrize("make", SCHEMES)
def test_the_others_go_on_when_one_sends_garbage(make, rig_of):
    rig = rig_of(PipeRig, make)
    os.write(rig.pipes[1].fileno(), HEADERS["negative"])  # worker 0
    with pytest.raises(shmsync.ProtocolError, match="worker 0"):
        rig.receive_until(Call(rig.sender.send, Stamped(4), timeout=60), [1])
    rig.receive([1])
    assert rig.stamps()[1] == 4
    rig.workers.append(joined := rig.make_scheme())
    rig.nets[0] = Stamped(0)
    joined.init_on_worker("policy", model=rig.nets[0], **rig.connect())
    rig.sender.register_worker(0, rig.pipes[-2])
    rig.receivers[0] = joined.get_receiver()
    rig.receive_until(Call(rig.sender.send, Stamped(5), timeout=60))
    assert rig.stamps() == [5, 5]


@pytest.mark.parametrize("start", [struct.pack("!i", 2**31 - 1), struct.pack("!iQ", -1, 2**31), b"\0\0", b""])
def test_a_header_and_then_silence_ends_at_the_deadline_and_takes_no_memory(rig, start):
    os.write(rig.pipes[1].fileno(), start + b"garbage" * (len(start) > 3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said, late = calls.overrun(rig.sender, "send", 0.2)
    assert said == {"AckTimeout"} and late < 0.1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    if len(start) > 3:
        with pytest.raises(shmsync.AckTimeout, match="worker 0 has sent 7 of the 2,147,483,64[78] bytes of a message"):
            rig.sender.send(Stamped(1))


def test_a_message_of_one_byte_at_a_time_ends_at_the_deadline(rig):
    bytes_ = struct.pack("!i", 10**6) + b"x" * 10_000
    ended = threading.Event()

    def drip():
        os.set_blocking(rig.pipes[1].fileno(), False)
        for byte in bytes_:
            with contextlib.suppress(BlockingIOError):
                os.write(rig.pipes[1].fileno(), bytes([byte]))
            if ended.wait(0.001):
                return

    dripping = Call(drip)
    said, late = calls.overrun(rig.sender, "send", 0.3)
    ended.set()
    dripping.result()
    assert said == {"AckTimeout"} and late < 0.1


def test_garbage_from_the_sender_is_an_error_in_the_worker_and_a_header_takes_no_memory(rig):
    os.write(rig.pipes[0].fileno(), struct.pack("!i", 2**31 - 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert rig.receivers[0].receive(0.05) is False
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    other, theirs = multiprocessing.Pipe()
    with other, theirs:
        os.write(other.fileno(), HEADERS["negative"])
        (scheme,) = rig.workers
        scheme.init_on_worker("policy", pipe=theirs, model=Stamped(0))
        for _ in range(2):
            with pytest.raises(shmsync.ProtocolError, match="from the sender is no message: a header .* of -5 bytes"):
                scheme.get_receiver().receive(0.05)
        scheme.get_receiver().close()


def test_large_messages_of_the_workers_own_still_come_whole(pipe):
    ours = MPTransport(pipe[0])
    body = os.urandom(30 << 20)
    sending = Call(pipe[1].send, body)
    found = []
    while not found:
        assert ours.receive_weights(timeout=0.01) is None
        found = ours.pending()
    sending.result()
    assert found == [body]


# ---- models that no worker has


@in_processes
@over_pipes
def test_a_model_that_no_receiver_has_is_named_with_those_that_are_there(fleet):
    policy, value = fleet.open("policy", timeout=60.0), fleet.open("value", timeout=60.0)
    scheme = fleet.make()
    fleet.init_sender(scheme, "valeu")
    with pytest.raises(shmsync.AckTimeout, match="worker 1: it has no .* 'valeu', only for 'policy', 'value'"):
        scheme.get_sender().send(Stamped(1), timeout=0.5)
    with pytest.raises(shmsync.AckTimeout, match="it has no receiver for 'valeu'"):
        scheme.get_sender().send(Stamped(2), timeout=0.5)
    assert policy.send(Stamped(3)) and value.send(Stamped(4))
    assert (fleet.stamps("policy"), fleet.stamps("value")) == ([3] * 3, [4] * 3)


@in_processes
@over_pipes
def test_a_receiver_that_is_made_while_its_model_is_sent_serves_it(fleet):
    fleet.open("policy", timeout=60.0).send(Stamped(1))
    scheme = fleet.make(timeout=60.0)
    fleet.init_sender(scheme, "value")
    sending = Call(scheme.get_sender().send, Stamped(5))
    link = scheme.get_sender().carrier.links[2]
    while link.end._reasons == {} and sending.is_alive():  # the worker has said that it does not know it
        time.sleep(0.001)
    for index in range(3):
        fleet.join(index, scheme, "value")
        fleet.workers[index].call(peers.receive, "value")  # what it has read already rings no bell
    assert sending.result() == 1
    assert fleet.stamps("value") == [5] * 3
