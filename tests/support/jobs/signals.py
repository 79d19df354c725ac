"""What a trainer does until Ctrl-C comes."""

from __future__ import annotations

import signal
import time

from support.jobs.engine import publish


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
