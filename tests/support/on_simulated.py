"""What a worker is told to do with an arena on the simulated device."""

from __future__ import annotations

import shmsync
from support.simulated import everywhere


def attach_there(state, handle):
    state.everywhere = everywhere(seed=4, longest=0.0005)
    state.everywhere.__enter__()
    state.sub = shmsync.Subscriber(handle, worker=0)


def value_there(state):
    with state.sub.read() as section:
        return set(section.weights["t"].tolist())


def close_there(state):
    state.sub.close()
    state.everywhere.__exit__(None, None, None)
