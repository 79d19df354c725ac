"""Ctrl-C again and again, at random moments of a call: what processes do in test_remote_interrupts.py."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import threading
import time

from torch import nn

from shmsync import DistributedWeightSyncScheme
from support.processes import PATIENCE
from support.remote.members import FOR_EVER, linear, members
from support.remote.threads import filled

ENOUGH = 20  # interrupts that land


def storm(action, seconds, longest):
    """Call it again and again, interrupted in its first `longest` seconds: (how often it was, other errors).

    So many seconds, and on a busy machine longer, until enough of them have come in the middle of a call.
    """
    armed, landed, others = False, 0, []
    chance = random.Random(0)

    def handler(number, frame):
        nonlocal armed
        if armed:  # a busy machine may deliver it when the call is over
            armed = False
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handler) for number in (signal.SIGALRM, signal.SIGINT)}
    strikes = queue.SimpleQueue()  # a Semaphore may stay locked after an interrupt

    def press():  # a real Ctrl-C comes from outside
        while (pause := strikes.get()) is not None:
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    try:
        end, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < end or (landed <= ENOUGH and time.monotonic() < end + PATIENCE / 4):
            rounds += 1
            try:
                armed = True
                if rounds % 2:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, longest))
                else:
                    strikes.put(chance.uniform(0, longest))
                action()
                armed = False
            except KeyboardInterrupt:
                landed += 1
            except Exception as error:
                armed = False
                others.append(f"{type(error).__name__}: {error}")
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        strikes.put(None)
        presser.join()
        for number, earlier in before.items():
            signal.signal(number, earlier)
    return landed, others


def storm_of_sends(state, how, seconds, longest=0.004):
    values = iter(range(1, 10**9))

    def fill():
        for parameter in state.model.parameters():
            nn.init.constant_(parameter, float(next(values)))

    def whole():
        fill()
        state.sender.send()

    def halves():
        fill()
        with contextlib.suppress(RuntimeError):  # one is pending
            state.sender.send_async()
        state.sender.wait_async()

    return storm({"send": whole, "send_async": halves}[how], seconds, longest)


def storm_at_a_transport(state, seconds, longest=0.003):
    weights = filled(state, 3.0).state_dict()
    return storm(lambda: state.transport.send_weights("policy", weights), seconds, longest)


def storm_of_receipts(state, seconds):
    """(landed, others, the versions that the model had, in order)."""
    receiver, versions = members["policy"].receiver, []

    def receive():
        receiver.receive(0.05)
        versions.append(receiver.version)

    return *storm(receive, seconds, 0.004), versions


def storm_of_beginnings(state, seconds):
    """init_on_sender() and shutdown() of schemes that nobody hears of; the number of threads before and after."""
    before = threading.active_count()

    def begin():
        scheme = DistributedWeightSyncScheme(timeout=FOR_EVER)
        scheme.init_on_sender("other", model=linear(10), store=state.store, num_workers=1)
        scheme.get_sender().send_async({"none": linear(10).weight[:0].detach()})
        scheme.shutdown()

    landed, others = storm(begin, seconds, 0.002)
    return landed, others, before


def make_model(state):
    state.model = linear(500)


def storm_of_initial_weights(state, seconds):
    """Nobody receives meanwhile."""
    values = iter(range(1, 10**9))

    def send():
        with contextlib.suppress(TimeoutError):  # an interrupt in a finalizer is lost
            send_initial(state, float(next(values)))

    return storm(send, seconds, 0.003)


def storm_of_initial_receipts(state, seconds):
    """Nobody sends meanwhile."""

    def receive():
        with contextlib.suppress(TimeoutError):
            state.transport.receive_initial_weights()

    return storm(receive, seconds, 0.003)


def send_initial(state, value):
    state.transport.send_initial_weights(filled(state, value).state_dict())
