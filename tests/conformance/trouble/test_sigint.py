"""A real SIGINT in a send: it ends with KeyboardInterrupt soon, and the next send works."""

import math
import os
import signal
import threading

import pytest

from support.calls import Call
from support.conformance.nets import Stamped
from support.processes import until_waits


@pytest.fixture
def interruptible():
    """Ctrl-C is a KeyboardInterrupt here, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_send_that_waits_for_a_stopped_worker_ends_with_keyboard_interrupt(fleet, interruptible):
    sender = fleet.open(timeout=math.inf)
    sender.send(Stamped(1))
    fleet.workers[1].stop()

    def interrupt():
        until_waits(threading.main_thread(), "send")
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = Call(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sender.send(Stamped(2))
    interrupting.result()
    fleet.workers[1].resume()
    assert sender.send(Stamped(3)) > 1
    assert fleet.stamps() == [3, 3, 3]
