"""What a trainer and its workers do while they get signals: timers with handlers in Python, and Ctrl-C."""

from __future__ import annotations

import signal
import time

from support.jobs.engine import publish
from support.weights import stamp, stamped, stamps

EVERY = 0.0004  # seconds
LAST = 300  # version


def begin(state):
    state.signals = 0

    def count(number, frame):
        state.signals += 1

    signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)


def end(state):
    signal.setitimer(signal.ITIMER_REAL, 0)
    return state.signals


def publish_all(state, how):
    """Every version up to the last, each waited for by all workers; (signals meanwhile, version)."""
    begin(state)
    for value in range(2, LAST + 1):
        if how == "in place":
            with state.pub.update(wait="all", timeout=60.0) as weights:
                stamp(weights, value)
        else:
            state.pub.publish(stamped(value), wait="all", timeout=60.0)
    return end(state), state.pub.version


def read_all(state):
    """Every version up to the last; (signals meanwhile, versions that were seen, the torn among them)."""
    begin(state)
    seen, torn = [0], 0
    while seen[-1] < LAST:
        state.sub.wait_version(seen[-1] + 1, timeout=60.0)
        low, high = state.sub.run(lambda: stamps(state.sub.weights))
        torn += low != high
        seen.append(low)
    return end(state), seen, torn


def may_be_interrupted(state):
    """Whatever the shell that began these tests has set."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def update_slowly(state, version):
    with state.pub.update() as weights:
        weights["large"].fill_(version)
        time.sleep(1000)


def publish_until_interrupted(state):
    """Publish without pause; the number of versions that came back."""
    try:
        while True:
            publish(state, state.pub.version + 1)
    except KeyboardInterrupt:
        return state.pub.version
