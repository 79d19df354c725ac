"""No call outlives its deadline by more than 100 ms, whatever keeps it."""

from __future__ import annotations

import contextlib

import pytest

from support.conformance import calls_of_senders as calls
from support.conformance.nets import Stamped
from support.conformance.table import PIPES, in_processes, over_pipes

pytestmark = in_processes
LATE = 0.1  # seconds


@contextlib.contextmanager
def a_worker_that_does_not_receive(fleet):
    fleet.hold(1)
    yield {}
    fleet.release(1)


@contextlib.contextmanager
def a_stopped_worker(fleet):
    fleet.workers[1].stop()
    yield {}
    fleet.workers[1].resume()


TROUBLES = [a_worker_that_does_not_receive, a_stopped_worker]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda each: each.__name__)
def test_every_call_ends_at_its_deadline(fleet, trouble):
    sender = fleet.open(timeout=60.0)
    sender.send(Stamped(1))
    with trouble(fleet):
        for call in ["send", "async", "resend"] if fleet.entry in PIPES else ["send", "async"]:
            said, late = fleet.with_sender(sender, calls.overrun, call, 0.25)
            assert said <= {"AckTimeout", "returned"} and "AckTimeout" in said
            assert late < LATE


@over_pipes
def test_a_full_pipe_does_not_keep_a_send(fleet):
    sender = fleet.open("policy", Stamped, 0, 1 << 18, timeout=60.0)
    sender.send(Stamped(1, 1 << 18))
    with a_stopped_worker(fleet):
        for call in ("send", "async"):
            said, late = calls.overrun(sender, call, 0.25, 1 << 18)
            assert "AckTimeout" in said and late < LATE
