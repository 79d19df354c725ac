"""Transports of the user's own: two methods are enough, and a send calls them directly."""

from __future__ import annotations

import pytest

import shmsync
from support.calls import naming
from support.conformance.nets import Stamped
from support.conformance.rigs import BoxScheme


class Asks:
    """Sends at once, and waits for the answer in wait_ack()."""

    error = None

    def __init__(self):
        self.got = []

    def send_weights(self, model_id, weights):
        raise AssertionError("its other method is there for sends")

    def send_weights_async(self, model_id, weights):
        self.got.append((model_id, weights, "sent"))

    def wait_ack(self):
        self.got.append("asked")
        if self.error is not None:
            raise self.error

    def receive_weights(self, timeout=1.0):
        return None


@pytest.fixture
def boxes():
    return [Asks(), Asks(), Asks()]


@pytest.fixture
def sender(boxes):
    scheme = BoxScheme()
    scheme.init_on_sender("policy", pipes=boxes)
    yield scheme.get_sender()
    scheme.shutdown()


def test_all_are_sent_to_before_the_first_is_asked(sender, boxes):
    assert sender.send(Stamped(1), timeout=60) == 1
    assert [len(box.got) for box in boxes] == [2, 2, 2] and boxes[0].got[1] == "asked"


def test_errors_of_transports_name_their_workers_when_the_others_are_done(sender, boxes):
    boxes[1].error = ZeroDivisionError("of the transport's own")
    boxes[2].error = OSError("of another one")
    with pytest.raises(ZeroDivisionError, match="of the transport's own") as caught:
        sender.send(Stamped(1))
    assert "worker 1" in caught.value.__notes__[0]
    assert "worker 2" in caught.value.__notes__[1] and "of another one" in caught.value.__notes__[1]
    assert [box.got[-1] for box in boxes] == ["asked"] * 3
    boxes[1].error = boxes[2].error = None
    assert sender.send(Stamped(2)) == 2


def test_a_time_out_of_a_transport_is_an_ack_timeout_that_names_the_worker(sender, boxes):
    boxes[2].error = TimeoutError("no answer")
    with naming(shmsync.AckTimeout, [2], match="worker 2: no answer"):
        sender.send(Stamped(1))
