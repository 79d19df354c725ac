"""Refused weights, dead workers, and workers that were replaced: what the next call does about each."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from multiprocessing import reduction

import pytest
import torch

import shmsync
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, send_together
from support.calls import Call
from support.conformance import peers
from support.conformance.nets import Stamped
from support.conformance.rigs import PipeRig
from support.conformance.table import MP, in_processes, only, over_pipes
from support.processes import until_waits


@in_processes
@only(MP)
def test_what_the_workers_refused_is_brought_to_nobody_else(fleet):
    sender = fleet.open(timeout=60.0)
    with pytest.raises(shmsync.ManifestMismatch):
        sender.send({"other": torch.zeros(1)})
    with pytest.raises(shmsync.ProtocolError, match="refused version 1"):
        sender.resend()
    assert sender.send(Stamped(1)) == 2
    with pytest.raises(shmsync.ManifestMismatch):
        sender.send({"other": torch.zeros(1)})
    index = fleet.add_worker()
    fleet.register(sender, index)
    fleet.join(index, fleet.make())
    assert sender.resend() == 2
    assert fleet.stamps() == [1] * 4
    assert sender.send(Stamped(2)) == 4  # the number of what was refused is not used again


@in_processes
@over_pipes
def test_what_one_worker_refused_is_refused_again_by_resend(fleet):
    scheme = fleet.make(timeout=60.0)
    fleet.init_sender(scheme)
    for index in range(3):
        fleet.join(index, scheme, "policy", Stamped, 0, 4 if index else 3)  # worker 0 has another model
    sender = scheme.get_sender()
    for call in (lambda: sender.send(Stamped(5)), sender.resend):
        with pytest.raises(shmsync.ManifestMismatch):
            call()
    assert fleet.stamps() == [0, 5, 5]


@in_processes
@over_pipes
def test_send_together_goes_on_with_the_living_whoever_reported_the_death(fleet):
    a, b = fleet.open("a", timeout=60.0), fleet.open("b", timeout=60.0)
    send_together({a: Stamped(1), b: Stamped(1)})
    fleet.workers[1].kill()
    with pytest.raises(shmsync.WorkerDied):
        a.send(Stamped(2))
    for value in (3, 4):
        send_together({a: Stamped(value), b: Stamped(value)})
        for model_id in "ab":
            assert fleet.stamps(model_id, [0, 2]) == [value] * 2
    assert a.is_dead(1) and b.is_dead(1)
    fleet.replace(1)
    fleet.register(a, 1)
    with pytest.raises(ValueError, match="different workers, or over different pipes"):
        send_together({a: Stamped(5), b: Stamped(5)})
    fleet.register(b, 1)
    for model_id in "ab":
        fleet.join(1, fleet.make(), model_id)
    send_together({a: Stamped(6), b: Stamped(6)})
    assert fleet.stamps("a") == fleet.stamps("b") == [6] * 3


def a_worker(make, pipe):
    scheme = make()
    scheme.init_on_worker("policy", pipe=pipe, model=Stamped(0))
    return scheme.get_receiver()


@pytest.fixture
def pipes():
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    yield pipes
    for ends in pipes:
        for end in ends:
            end.close()


@pytest.mark.parametrize("make", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_a_second_init_on_sender_has_the_new_workers_alone(pipes, make):
    scheme = make(timeout=60.0)
    scheme.init_on_sender("policy", pipes=[pipes[0][0], pipes[1][0]])
    scheme.init_on_sender("policy", pipes=[pipes[2][0]])
    sender = scheme.get_sender()
    assert sender.worker_ids == [0]
    receiver = a_worker(make, pipes[2][1])
    receiving = Call(receiver.receive, 60)
    sender.send(Stamped(1))
    assert receiving.result() is True
    receiver.close()
    scheme.shutdown()


def test_models_of_one_scheme_have_the_same_workers(pipes):
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender("policy", pipes=[pipes[0][0]])
    with pytest.raises(ValueError, match="worker 0 is reached over another pipe for 'policy'"):
        scheme.init_on_sender("value", pipes=[pipes[1][0]])
    scheme.init_on_sender("value", pipes=[pipes[0][0], pipes[1][0]])
    assert scheme.get_sender().worker_ids == [0, 1]
    scheme.shutdown()


@pytest.mark.parametrize("make", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_receive_in_a_meeting_ends_when_its_sender_is_gone(pipes, start, make, end):
    """The trainer waits for a second worker, which never comes; so the first waits in its receive()."""
    trainer = start()
    for ours, _ in pipes[:2]:
        trainer.start(peers.take_pipes)
        reduction.send_handle(trainer.conn, ours.fileno(), trainer.pid)
        trainer.result()
        ours.close()
    receiver = a_worker(make, pipes[0][1])
    trainer.start(peers.meet, make, math.inf if end == "killed" else 1.0)
    with contextlib.ExitStack() as stack:
        assert pipes[1][1].poll(60)  # the second worker was asked
        receiving = Call(receiver.receive, 0.01)
        until_waits(receiving, "_receive_jointly")
        if end == "killed":
            trainer.kill()
            with pytest.raises(shmsync.WriterDied):
                receiving.result()
        else:
            trainer.stop()
            stack.callback(trainer.resume)
            assert receiving.result() is False
    receiver.close()


@pytest.mark.parametrize("partial", [False, True])
def test_extra_state_that_cannot_be_set_leaves_the_old_weights(partial, rig_of):
    class Stateful(Stamped):
        refuses = False

        def get_extra_state(self):
            return int(self.count[0])

        def set_extra_state(self, state):
            if self.refuses:
                raise OSError("no such state")

    rig = rig_of(PipeRig, MultiProcessWeightSyncScheme, partial=partial, nets=[Stateful(0), Stateful(0)])
    rig.deliver(Stateful(1))
    for net in rig.nets:
        net.refuses = True
    with pytest.raises(OSError, match="no such state"):
        rig.deliver(Stateful(2))
    assert rig.stamps() == [1, 1]
