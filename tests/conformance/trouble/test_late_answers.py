"""Pipes that have a past: earlier senders, restarted schemes."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

import shmsync
from shmsync.schemes import (
    MPTransport,
    MultiProcessWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
)
from support.calls import Call
from support.conformance.nets import Stamped
from support.conformance.rigs import PipeRig

SCHEMES = [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme]


@pytest.mark.parametrize("make", SCHEMES)
def test_a_late_answer_never_counts_for_another_sender_of_the_same_pipe(rig_of, make):
    rig, other = rig_of(PipeRig, make), make()
    rig.sender.send_async(Stamped(1))
    with pytest.raises(shmsync.AckTimeout):
        rig.sender.wait_async(timeout=0.05)
    other.init_on_sender("policy", **rig.addresses())
    version = rig.receive_until(Call(other.get_sender().send, Stamped(2), timeout=60))
    assert rig.stamps() == [2, 2] and version > rig.sender.version
    other.shutdown()


@pytest.mark.parametrize("make", SCHEMES)
def test_answers_that_are_there_count_at_a_deadline_that_has_passed(rig_of, make):
    rig = rig_of(PipeRig, make)
    rig.sender.send_async(Stamped(1))
    assert all(receiver.receive(timeout=10) for receiver in rig.receivers)
    assert rig.sender.wait_async(timeout=0) == 1


def mp_transport(pipe):
    return MPTransport(pipe, timeout=0.2)


def shared_transport(pipe):
    transport = SharedMemTransport(timeout=0.2)
    transport.register_pipe(pipe)
    return transport


@pytest.mark.parametrize(("make", "words"), [(mp_transport, [None]), (shared_transport, [None, ("policy", 1)])])
def test_a_late_answer_never_counts_for_another_transport_of_the_same_pipe(make, words):
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        first, second = make(ours), make(ours)
        first.send_weights_async("policy", {"weight": torch.ones(3)})
        kinds = [theirs.recv()[1] for _ in words]
        second.send_weights_async("policy", {"weight": torch.zeros(3)})
        for data, kind in zip(words, kinds, strict=True):  # late, and to the first transport's messages alone
            theirs.send((data, "registered" if kind == "register_shared_weights" else "updated"))
        with pytest.raises(shmsync.AckTimeout):
            second.wait_ack()
    for transport in (first, second):
        getattr(transport, "close", lambda: None)()
