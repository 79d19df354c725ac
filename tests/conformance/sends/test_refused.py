"""Refused weights, dead workers, and workers that were replaced: what the next call does about each."""

from __future__ import annotations

import multiprocessing

import pytest

from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.calls import Call
from support.conformance.nets import Stamped


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
