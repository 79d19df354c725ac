"""Ctrl-C again and again, at random moments of a call: what processes do in test_remote_interrupts.py."""

from __future__ import annotations

import contextlib
import threading
import time

from shmsync import DistributedWeightSyncScheme
from support.faults.interrupts import alarms
from support.processes import PATIENCE
from support.remote.members import FOR_EVER, linear, members
from support.remote.threads import filled
from support.weights import fill

ENOUGH = 20  # interrupts that land
SECONDS = 0.5  # of a storm


def storm(action, longest):
    """Call it again and again, interrupted in its first `longest` seconds; its other errors.

    So many seconds, and on a busy machine longer, until enough of them have come in the middle of a call.
    """
    others, end = [], time.monotonic() + SECONDS
    with alarms(pressed=True) as interrupted:
        while (left := end - time.monotonic()) > 0 or (interrupted.landed <= ENOUGH and left > -PATIENCE / 4):
            try:
                interrupted(action, longest)
            except Exception as error:
                others.append(f"{type(error).__name__}: {error}")
    assert interrupted.landed > ENOUGH
    return others


def storm_of_sends(state, how, longest=0.004):
    values = iter(range(1, 10**9))

    def whole():
        fill(state.model, float(next(values)))
        state.sender.send()

    def halves():
        fill(state.model, float(next(values)))
        with contextlib.suppress(RuntimeError):  # one is pending
            state.sender.send_async()
        state.sender.wait_async()

    return storm({"send": whole, "send_async": halves}[how], longest)


def storm_at_a_transport(state, longest=0.003):
    weights = filled(state, 3.0).state_dict()
    return storm(lambda: state.transport.send_weights("policy", weights), longest)


def storm_of_receipts(state):
    """(other errors, the versions that the model had, in order)."""
    receiver, versions = members["policy"].receiver, []

    def receive():
        receiver.receive(0.05)
        versions.append(receiver.version)

    return storm(receive, 0.004), versions


def storm_of_beginnings(state):
    """init_on_sender() and shutdown() of schemes without workers: (other errors, how many threads there were)."""
    before = threading.active_count()

    def begin():
        scheme = DistributedWeightSyncScheme(timeout=FOR_EVER)
        scheme.init_on_sender("other", model=linear(10), store=state.store, num_workers=1)
        scheme.get_sender().send_async({"none": linear(10).weight[:0].detach()})
        scheme.shutdown()

    return storm(begin, 0.002), before


def make_model(state):
    state.model = linear(500)


def storm_of_initial_weights(state):
    """No worker receives meanwhile."""
    values = iter(range(1, 10**9))

    def send():
        with contextlib.suppress(TimeoutError):  # an interrupt in a finalizer is lost
            send_initial(state, float(next(values)))

    return storm(send, 0.003)


def storm_of_initial_receipts(state):
    """The trainer does not send meanwhile."""

    def receive():
        with contextlib.suppress(TimeoutError):
            state.transport.receive_initial_weights()

    return storm(receive, 0.003)


def send_initial(state, value):
    state.transport.send_initial_weights(filled(state, value).state_dict())
