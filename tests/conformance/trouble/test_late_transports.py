"""A transport of the user's own in two steps, over a pipe: an answer that was late counts for no other send."""

import multiprocessing

import pytest
import torch

import shmsync
from shmsync.schemes import WeightSyncScheme
from support.calls import Call, naming


class PipeTransport:
    """A user's: whole weights through a pipe, and words back, oldest first."""

    def __init__(self, pipe):
        self.pipe = pipe

    def send_weights(self, model_id, weights):
        self.send_weights_async(model_id, weights)
        self.wait_ack()

    def send_weights_async(self, model_id, weights):
        self.pipe.send((model_id, {name: each.tolist() for name, each in weights.items()}))

    def wait_ack(self):
        word = self.pipe.recv()
        if word != "ok":
            raise RuntimeError(word)

    def receive_weights(self, timeout=1.0):
        return self.pipe.recv() if self.pipe.poll(timeout) else None


class TimedTransport(PipeTransport):
    def wait_ack(self, timeout=None):
        if not self.pipe.poll(timeout):
            raise TimeoutError("no answer")
        super().wait_ack()


class UserScheme(WeightSyncScheme):
    kind = PipeTransport

    def create_transport(self, pipe_or_context):
        return self.kind(pipe_or_context)


@pytest.fixture
def connect():
    made = []

    def connect(kind):
        ours, theirs = multiprocessing.Pipe()
        made.extend([ours, theirs])
        scheme = UserScheme()
        scheme.kind = kind
        scheme.init_on_sender("policy", pipes=[ours])
        return scheme.get_sender(), theirs

    yield connect
    for pipe in made:
        pipe.close()


LARGE = 1 << 20  # elements: more than a pipe takes while no process reads it


def weights(value, size=1):
    return {"w": torch.full((size,), float(value))}


def take(theirs):
    """In the worker: read one message; which weights it brings."""
    assert theirs.poll(60)
    return theirs.recv()[1]["w"][0]


KINDS = [PipeTransport, TimedTransport]


@pytest.mark.parametrize(
    ("kind", "size", "timeout"),
    [
        (PipeTransport, LARGE, 60),  # late in its first step: the pipe is full, and is not read
        (TimedTransport, LARGE, 60),
        (TimedTransport, 1, None),  # in its second; then without a deadline too
    ],
)
def test_answer_to_a_send_that_was_late_counts_for_no_other(connect, kind, size, timeout):
    sender, theirs = connect(kind)
    with pytest.raises(shmsync.AckTimeout):
        sender.send(weights(1, size), timeout=0.2)
    assert take(theirs) == 1
    theirs.send("ok")  # too late
    with naming(shmsync.AckTimeout, [0]):
        sender.send(weights(2), timeout=0.2)  # the worker has not taken these
    assert take(theirs) == 2
    theirs.send("ok")
    call = Call(sender.send, weights(3), timeout=timeout)
    assert take(theirs) == 3
    assert call.is_alive()  # the answer to 2 did not count for it
    theirs.send("ok")
    assert call.result() == 3


@pytest.mark.parametrize("kind", KINDS)
def test_error_that_answers_a_late_send_is_not_raised_by_the_next(connect, kind):
    sender, theirs = connect(kind)
    with pytest.raises(shmsync.AckTimeout):
        sender.send(weights(1, LARGE), timeout=0.2)
    assert take(theirs) == 1
    theirs.send("cannot apply 1")
    call = Call(sender.send, weights(2), timeout=60)
    assert take(theirs) == 2
    theirs.send("cannot apply 2")
    with pytest.raises(RuntimeError, match="cannot apply 2"):
        call.result()


def test_worker_that_takes_the_place_of_a_late_one_owes_nothing(connect):
    sender, _ = connect(TimedTransport)
    with pytest.raises(shmsync.AckTimeout):
        sender.send(weights(1), timeout=0.2)
    ours, other = multiprocessing.Pipe()
    sender.register_worker(0, ours)
    call = Call(sender.send, weights(2), timeout=60)
    assert take(other) == 2
    other.send("ok")
    assert call.result() == 2
    ours.close()
    other.close()


def test_transport_that_passes_over_old_answers_says_so(connect):
    class Named(TimedTransport):
        """Its answers name what they answer."""

        sent = 0

        def send_weights_async(self, model_id, weights):
            self.sent = int(weights["w"][0])
            super().send_weights_async(model_id, weights)

        def wait_ack(self, timeout=None):
            while True:
                if not self.pipe.poll(timeout):
                    raise TimeoutError("no answer")
                if self.pipe.recv() == self.sent:
                    return

        def forget_posted(self):
            """Old answers are passed over."""

    sender, theirs = connect(Named)
    with pytest.raises(shmsync.AckTimeout):
        sender.send(weights(1), timeout=0.2)
    assert take(theirs) == 1
    theirs.send(1)
    call = Call(sender.send, weights(2), timeout=60)
    assert take(theirs) == 2
    theirs.send(2)
    assert call.result() == 2
