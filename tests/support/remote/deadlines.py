"""How long calls last beyond their deadlines, measured in the process that makes them."""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from shmsync import DistributedWeightSyncScheme
from support.remote import transports
from support.remote.members import linear, members


def overrun(call, timeout, tries=10):
    """By how much the call outlived its timeout, at its best: a busy machine delays some tries, and then gets more."""
    smallest = float("inf")
    for number in range(tries):
        if number >= 3 and smallest < 0.1:
            break
        began = time.monotonic()
        with contextlib.suppress(Exception):
            call()
        smallest = min(smallest, time.monotonic() - began - timeout)
    return smallest


def send(state, timeout):
    return overrun(lambda: state.sender.send(timeout=timeout), timeout)


def send_in_halves(state, timeout):
    """send_async() and wait_async() have a deadline each."""

    def call():
        with contextlib.suppress(Exception):
            state.sender.send_async(timeout=timeout)
        state.sender.wait_async(timeout=timeout)

    return overrun(call, 2 * timeout)


def use_transport(state, call, timeout, *args, **kwargs):
    """A call of state.transport that is given its timeout."""
    return overrun(lambda: getattr(state.transport, call)(*args, timeout=timeout, **kwargs), timeout)


def send_by_hand(state, timeout):
    return use_transport(state, "send_weights", timeout, "policy", transports.SAMPLES["flat"]())


def send_by_hand_in_halves(state, timeout):
    def call():
        state.transport.send_weights_async("policy", transports.SAMPLES["flat"]())
        state.transport.wait_ack(timeout=timeout)

    return overrun(call, timeout)


def receive(state, timeout):
    return overrun(lambda: members["policy"].receiver.receive(timeout), timeout)


def join(state, timeout):
    """init_on_worker() waits for the store as long as its scheme may."""

    def call():
        scheme = DistributedWeightSyncScheme(timeout=timeout)
        scheme.init_on_worker("policy", model=linear(10), store=state.store, rank=dist.get_rank())

    return overrun(call, timeout)


def shut_down(state, timeout):
    return overrun(lambda: state.scheme.shutdown(), timeout, tries=1)
