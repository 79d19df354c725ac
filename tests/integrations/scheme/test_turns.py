"""One send at a time: what a second thread, a signal handler and Ctrl-C find. No send outlives its deadline."""

from __future__ import annotations

import math
import signal
import threading
import time

import pytest
from torch import nn

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.calls import Call
from support.faults.interrupts import on_alarm
from support.processes import until_waits
from support.torchrl.pair import Held, filled


@pytest.fixture
def busy(pair, in_forward):
    """A pair whose worker is in a forward, so that sends wait; and what ends the forward."""
    made = pair(Held(2, 2), workers=1, timeout=60)
    return made, in_forward(made.models[0])


@pytest.fixture
def alarm():
    """alarm(handler): it runs in the main thread, in whatever that does a moment later."""
    handlers = []

    def ring(handler, after=0.3):
        handlers.append(handler)
        signal.setitimer(signal.ITIMER_REAL, after)

    with on_alarm(lambda *_: handlers[-1]()):
        yield ring


def test_it_waits_no_longer_than_its_own_deadline(busy):
    pair, end_forward = busy
    first = Call(pair.sender.send, filled(Held(2, 2), 1))
    until_waits(first, "send")
    with pytest.raises(shmsync.WriterBusy, match="another thread"):
        pair.sender.send(filled(Held(2, 2), 2), timeout=0.1)
    end_forward()
    first.result()
    assert pair.weights("weight")[0].unique().tolist() == [1]


def test_a_send_inside_a_send_of_the_same_thread_is_refused_at_once(busy, alarm):
    pair, end_forward = busy
    caught = []

    def handler():
        with pytest.raises(shmsync.WriterBusy, match="same thread") as error:
            pair.sender.send(filled(Held(2, 2), 2), timeout=math.inf)  # a wait would never end
        caught.append(error)
        end_forward()

    alarm(handler)
    version = pair.sender.send(filled(Held(2, 2), 1))
    assert len(caught) == 1
    assert pair.weights("weight")[0].unique().tolist() == [1]
    assert pair.sender.send(filled(Held(2, 2), 3)) == version + 1


def overrun(call, timeout):
    """Seconds that a call which raises TimeoutError or WorkerDied took beyond its timeout."""
    start = time.monotonic()
    with pytest.raises((TimeoutError, shmsync.WorkerDied)):
        call(timeout=timeout)
    return time.monotonic() - start - timeout


@pytest.mark.parametrize("slots", [1, 2])
def test_a_worker_in_a_long_forward_holds_no_send_beyond_its_deadline(pair, in_forward, slots):
    made = pair(Held(2, 2), workers=2, slots=slots)
    in_forward(made.models[0])
    overruns = [overrun(lambda timeout: made.sender.send(Held(2, 2), timeout=timeout), 0.1) for _ in range(3)]
    assert min(overruns) < 0.1


def test_workers_that_leave_hold_no_send_beyond_its_deadline(pair):
    """Each closes its line, and its process lives on: here it is this one."""
    overruns = []
    for _ in range(3):
        made = pair(nn.Linear(2, 2), workers=5)
        made.sender.send(nn.Linear(2, 2))
        for receiver in made.receivers[:4]:
            receiver.shutdown()
        overruns.append(overrun(lambda timeout, made=made: made.sender.send(nn.Linear(2, 2), timeout=timeout), 0.0))
    assert min(overruns) < 0.1


def test_a_worker_that_leaves_during_a_send_does_not_prolong_it(pair, in_forward):
    overruns = []
    for _ in range(3):
        made = pair(Held(2, 2), workers=3, slots=2)
        made.sender.send(Held(2, 2), timeout=60)
        in_forward(made.models[0])
        leaving = threading.Timer(0.28, lambda made=made: made.receivers[1].shutdown())
        leaving.start()
        overruns.append(overrun(lambda timeout, made=made: made.sender.send(Held(2, 2), timeout=timeout), 0.3))
        leaving.join()
    assert min(overruns) < 0.1


def test_the_timeout_of_a_send_may_be_none_or_infinite(pair):
    made = pair(nn.Linear(2, 2), workers=1)
    assert made.sender.send(nn.Linear(2, 2), timeout=None) < made.sender.send(nn.Linear(2, 2), timeout=math.inf)
    assert ShmWeightSyncScheme(timeout=math.inf).timeout == math.inf
    assert ShmWeightSyncScheme(timeout=None).timeout == ShmWeightSyncScheme().timeout == 10.0
