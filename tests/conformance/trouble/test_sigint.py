"""A real SIGINT in a send: it ends with KeyboardInterrupt soon, and the next send works."""

import os
import signal
import threading
import time

import pytest

from support.conformance.nets import Stamped


@pytest.fixture
def interruptible():
    """Ctrl-C is a KeyboardInterrupt here, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_send_that_waits_for_a_stopped_worker_ends_with_keyboard_interrupt(fleet, interruptible):
    sender = fleet.open(timeout=60.0)
    sender.send(Stamped(1))
    fleet.workers[1].stop()
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sender.send(Stamped(2))
    assert time.monotonic() - sent[0] < 0.5
    timer.join()
    fleet.workers[1].resume()
    assert sender.send(Stamped(3)) > 1
    assert fleet.stamps() == [3, 3, 3]
