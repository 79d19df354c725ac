"""send(timeout=) with transports of the user's own, which know of deadlines or do not."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading

import pytest
import torch

import shmsync
from shmsync.schemes import MPTransport, WeightSyncScheme
from support.calls import naming
from support.conformance import calls_of_senders as calls
from support.conformance.nets import Stamped, stamp
from support.conformance.rigs import BoxScheme


class Box:
    """A transport of two methods; `gate` keeps its calls."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.got = []
        self.threads = []
        self.calls = []

    def held(self, timeout=None):
        """Wait at the gate; False: it stays closed for that long."""
        self.threads.append(threading.current_thread())
        return self.gate.wait(60 if timeout is None else timeout)

    @contextlib.contextmanager
    def call(self):
        self.calls.append(threading.Event())
        try:
            yield
        finally:
            self.calls[-1].set()

    def finish(self):
        """Wait until each of its calls has returned."""
        self.gate.set()
        for call in self.calls:
            assert call.wait(60)

    def send_weights(self, model_id, weights):
        with self.call():
            assert self.held()
            self.got.append({key: tensor.clone() for key, tensor in weights.items()})

    def receive_weights(self, timeout=1.0):
        return None


class Asks(Box):
    """Sends at once, and waits for the answer in wait_ack()."""

    def send_weights_async(self, model_id, weights):
        self.got.append(weights)

    def wait_ack(self):
        with self.call():
            assert self.held()


class Timed(Asks):
    """Its wait_ack() takes a timeout."""

    def wait_ack(self, timeout=None):
        if not self.held(timeout):
            raise TimeoutError("no answer")


class Broken(Asks):
    def wait_ack(self):
        raise ZeroDivisionError("of the transport's own")


@pytest.fixture
def connect():
    made = []

    def connect(*kinds):
        boxes = [kind() for kind in kinds]
        scheme = BoxScheme()
        scheme.init_on_sender("policy", pipes=boxes)
        made.extend(boxes)
        return scheme.get_sender(), boxes

    yield connect
    for box in made:
        box.finish()


@pytest.mark.parametrize("kind", [Box, Asks, Timed])
@pytest.mark.parametrize("name", ["send", "async"])
def test_a_transport_that_does_not_come_back_is_late_at_the_deadline_of_the_send(connect, kind, name):
    sender, boxes = connect(kind, kind, kind)
    boxes[1].gate.clear()
    said, late = calls.overrun(sender, name, 0.2)
    assert "AckTimeout" in said and late < 0.1
    with naming(shmsync.AckTimeout, [1], match="worker 1"):
        sender.send(Stamped(1), timeout=0.2)
    boxes[1].gate.set()
    count = len(boxes[1].got)
    sender.send(Stamped(2), timeout=60)
    assert len(boxes[1].got) > count and boxes[1].got[-1]["count"].tolist() == [2, 2, 2]
    assert boxes[0].got[-1]["count"].tolist() == boxes[2].got[-1]["count"].tolist() == [2, 2, 2]


def test_the_next_send_waits_for_what_a_transport_still_does(connect):
    sender, (box,) = connect(Box)
    box.gate.clear()
    with pytest.raises(shmsync.AckTimeout):
        sender.send(Stamped(1), timeout=0.1)
    with pytest.raises(shmsync.AckTimeout, match="worker 0 is still busy with an earlier send"):
        sender.send(Stamped(2), timeout=0.1)
    threading.Timer(0.1, box.gate.set).start()
    sender.send(Stamped(3))  # without a deadline it waits, and is called in this thread
    assert [got["count"][0].item() for got in box.got] == [1, 3]
    assert box.threads[-1] is threading.current_thread()


def test_a_late_transport_sends_the_weights_of_its_send_whatever_the_trainer_does_since(connect):
    sender, (box,) = connect(Box)
    net = Stamped(1)
    box.gate.clear()
    with pytest.raises(shmsync.AckTimeout):
        sender.send(net, timeout=0.1)
    stamp(net, 2)
    box.finish()
    assert all((tensor == 1).all() for tensor in box.got[0].values())


def test_without_a_timeout_every_method_is_called_as_it_is(connect):
    sender, boxes = connect(Box, Asks, Timed)
    assert sender.send(Stamped(1)) == 1
    assert {thread for box in boxes for thread in box.threads} == {threading.current_thread()}


def test_sends_with_a_deadline_to_a_worker_that_answers_share_one_thread(connect):
    sender, (box,) = connect(Box)
    for value in range(5):
        sender.send(Stamped(value), timeout=60)
    assert len(set(box.threads)) == 1 and threading.current_thread() not in box.threads


def test_a_forked_child_sends_with_a_deadline_as_its_parent_did(connect):
    sender, (box,) = connect(Box)
    sender.send(Stamped(1), timeout=60)
    ours, theirs = multiprocessing.Pipe()

    def send():
        sender.send(Stamped(2), timeout=60)
        theirs.send(box.got[-1]["count"].tolist())

    child = multiprocessing.get_context("fork").Process(target=send)
    child.start()
    theirs.close()
    assert ours.poll(60) and ours.recv() == [2, 2, 2]
    child.join()
    ours.close()


def test_an_error_of_a_transport_is_raised_when_the_others_are_done(connect):
    sender, boxes = connect(Broken, Asks)
    for timeout in (None, 60):
        with pytest.raises(ZeroDivisionError, match="of the transport's own"):
            sender.send({"w": torch.zeros(1)}, timeout=timeout)
        assert len(boxes[1].threads) == (1 if timeout is None else 2)


@pytest.mark.parametrize("timeout", [None, 60])
def test_what_an_interrupted_send_has_sent_is_not_waited_for_by_the_next(timeout):
    class Interrupted(MPTransport):
        left = 1

        def send_weights_async(self, model_id, weights):
            if Interrupted.left == 0 and self is transports[1]:
                Interrupted.left = -1
                raise KeyboardInterrupt
            Interrupted.left -= self is transports[1]
            return super().send_weights_async(model_id, weights)

    pipes = [multiprocessing.Pipe() for _ in range(2)]
    scheme = type("Scheme", (WeightSyncScheme,), {"create_transport": lambda self, pipe: Interrupted(pipe, 60.0)})()
    scheme.init_on_sender("policy", pipes=[ours for ours, _ in pipes])
    sender = scheme.get_sender()
    transports = [sender._transports[index] for index in range(2)]
    workers = [MPTransport(theirs) for _, theirs in pipes]
    Interrupted.left = 1
    sender.send_async(Stamped(1), timeout=timeout)
    for worker in workers:
        assert worker.receive_weights() is not None
        worker.send_ack()
    sender.wait_async(timeout=60)
    with pytest.raises(KeyboardInterrupt):
        sender.send_async(Stamped(2), timeout=timeout)
    for worker in workers:  # a worker that was sent it answers, and no call waits for that
        if worker.receive_weights(timeout=0.05) is not None:
            worker.send_ack()
    with naming(shmsync.AckTimeout, [0, 1]):
        sender.send(Stamped(3), timeout=0.2)
    for each in (*pipes[0], *pipes[1]):
        each.close()
