"""Pipes that have a past: earlier senders, restarted schemes, workers that sit in a meeting that failed."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest
import torch
from torch import nn

import shmsync
from shmsync.schemes import (
    MPTransport,
    MultiProcessWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    send_together,
)
from shmsync.schemes.pipes import multi_model as together
from support.weights import fill

SCHEMES = [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme]


def model(value):
    return fill(nn.Linear(2, 2), value)


class Receiving:
    """A worker in a thread, one receiver for each model; `pause` keeps it out of receive()."""

    def __init__(self, make, pipe, *ids):
        self.models = {model_id: model(0) for model_id in ids}
        self.receivers = []
        for model_id, module in self.models.items():
            scheme = make()
            scheme.init_on_worker(model_id, pipe=pipe, model=module)
            self.receivers.append(scheme.get_receiver())
        self.pause = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            with self.pause:
                for receiver in self.receivers:
                    receiver.receive(0.01)
            time.sleep(0.001)

    def value(self, model_id):
        return self.models[model_id].weight[0, 0].item()

    def close(self):
        self._stop.set()
        self._thread.join()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def connect():
    """connect(scheme class, ids) -> (sender's pipe, worker); all is closed at the end."""
    made = []

    def connect(make, *ids):
        ours, theirs = multiprocessing.Pipe()
        worker = Receiving(make, theirs, *ids)
        made.append((ours, theirs, worker))
        return ours, worker

    yield connect
    for ours, theirs, worker in made:
        worker.close()
        ours.close()
        theirs.close()


def sender(make, pipe, model_id="policy", **options):
    scheme = make(**options)
    scheme.init_on_sender(model_id, pipes=[pipe])
    return scheme, scheme.get_sender()


@pytest.mark.parametrize("make", SCHEMES)
def test_a_late_answer_never_counts_for_another_sender_of_the_same_pipe(connect, make):
    pipe, worker = connect(make, "policy")
    first, old = sender(make, pipe)
    with worker.pause, pytest.raises(shmsync.AckTimeout):
        old.send(model(1), timeout=0.05)
    second, new = sender(make, pipe)
    version = new.send(model(2))
    assert worker.value("policy") == 2 and version > old.version
    first.shutdown()
    second.shutdown()


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


@pytest.mark.parametrize("make", SCHEMES)
def test_a_worker_that_was_kept_out_of_a_meeting_comes_back(connect, make, monkeypatch):
    pipe, worker = connect(make, "a", "b")
    (scheme_a, a), (scheme_b, b) = (sender(make, pipe, model_id) for model_id in "ab")
    send_together({a: model(1), b: model(1)})
    write = together.write

    def interrupted(*args):
        write(*args)
        raise KeyboardInterrupt  # everything is written, and no worker was sent a message

    monkeypatch.setattr(together, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        send_together({a: model(2), b: model(2)})
    monkeypatch.undo()
    assert b.send(model(3)) > 1 and worker.value("b") == 3
    send_together({a: model(4), b: model(4)})
    assert [worker.value(model_id) for model_id in "ab"] == [4, 4]
    scheme_a.shutdown()
    scheme_b.shutdown()


def test_a_worker_that_lost_its_place_in_the_queue_is_answered_by_hand(connect):
    ours, theirs = multiprocessing.Pipe()
    _, policy = sender(MultiProcessWeightSyncScheme, ours)
    with ours, theirs:
        big = {"w": torch.zeros(300_000)}
        for value in range(3):  # the first fills the pipe, the second never leaves it
            with pytest.raises(shmsync.AckTimeout):
                policy.send({"w": big["w"] + value}, timeout=0.01)
        seen = []

        def answer():
            while len(seen) < 3:
                (_, weights), _ = theirs.recv()
                seen.append(weights["w"][0].item())
                theirs.send((None, "updated"))

        thread = threading.Thread(target=answer)
        policy.send_async({"w": big["w"] + 3})  # before the worker reads: room in the pipe would let the third leave
        thread.start()
        policy.wait_async()
        policy.send({"w": torch.full((1,), 4.0)})
        thread.join()
        assert seen == [0, 3, 4]  # each answer counted for the message that it answered


def test_resend_brings_a_group_to_its_own_newest_version(connect):
    groups = {"groups": [[0], [1]]}
    pipes, workers = zip(*(connect(SharedMemWeightSyncScheme, "policy") for _ in range(2)), strict=True)
    scheme = SharedMemWeightSyncScheme(**groups)
    scheme.init_on_sender("policy", pipes=list(pipes))
    policy = scheme.get_sender()
    assert policy.send(model(1), 0) == 1
    with pytest.raises(ValueError, match="group of worker 1"):
        policy.resend(1)
    assert policy.send(model(2)) == 2
    assert policy.send(model(3), 1) == 3
    assert policy.resend(0) == 2
    assert [worker.value("policy") for worker in workers] == [2, 3]
    scheme.shutdown()


def test_an_answer_larger_than_the_pipe_arrives_in_pieces(connect):
    pipe, _ = connect(MultiProcessWeightSyncScheme, "policy")
    _, policy = sender(MultiProcessWeightSyncScheme, pipe)
    with pytest.raises(shmsync.ManifestMismatch, match="missing"):
        policy.send({"k" * 40 + str(i): torch.zeros(1) for i in range(20_000)})
    assert policy.send(WeightStrategy().extract_weights(model(1))) == 2
