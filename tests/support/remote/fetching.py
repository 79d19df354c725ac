"""What the processes of tests do and tell about weights that workers fetch, and about nodes with one worker."""

from __future__ import annotations

import gc
import logging

from shmsync.schemes.remote import relay
from shmsync.schemes.remote.packed_weights import PackedWeights
from shmsync.schemes.remote.weight_server import WeightServer

MANY = 500_000  # features of a model: 8 MB


def log(state):
    """Keep what shmsync logs from now on."""
    state.logged = []

    class Keep(logging.Handler):
        def emit(self, record):
            state.logged.append(record.getMessage())

    logging.getLogger("shmsync").addHandler(Keep())


def logged(state):
    return state.logged


def block_the_port(state):
    """Close the weight server: no worker can connect to this process any more to fetch weights, nor go on with it."""
    (weight_server,) = (each for each in gc.get_objects() if isinstance(each, WeightServer))
    weight_server._end()


def kept_packed(state):
    """How many there are in this process."""
    gc.collect()
    return sum(isinstance(each, PackedWeights) for each in gc.get_objects())


def relays_here(state):
    """How many relays this process hosts."""
    return len(relay._hosted)
