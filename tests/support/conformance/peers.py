"""What the workers of the conformance suite do when the test calls them."""

from __future__ import annotations

import os
import signal
from multiprocessing import connection, reduction
from pathlib import Path

from shmsync.schemes.pipe import Pipe
from support.conformance.nets import ask

# ---- a worker's life


def receive_until_called(state):
    """What a worker does between the calls of the test."""
    if not hasattr(state, "models"):
        start_over(state)
    try:
        while state.receivers and not state.held:
            ready = connection.wait([state.conn, state.pipe])
            for receiver in state.receivers.values():  # before the call: what was sent earlier is applied earlier
                receiver.receive(timeout=0)
            if state.conn in ready:
                return
    except Exception as error:
        state.held, state.error = True, error


def start_over(state):
    state.models, state.schemes, state.receivers = {}, {}, {}
    state.pipe = state.error = state.context = None
    state.given = {}  # what init_on_worker() gets beside the model: where the weights come from
    state.held = False


def take_pipe(state, index):
    state.pipe = connection.Connection(reduction.recv_handle(state.conn))
    state.given = {"pipe": state.pipe}
    state.index = index


def join(state, scheme, model_id, make, *args):
    model = make(*args)
    scheme.init_on_worker(model_id, model=model, worker_idx=state.index, **state.given)
    keep(state, model_id, scheme, model)


def keep(state, model_id, scheme, model=None):
    """From now on weights of this id are received."""
    if model is not None:
        state.models[model_id] = model
    state.schemes[model_id], state.receivers[model_id] = scheme, scheme.get_receiver()


def leave(state):
    """Forget everything, for the next test."""
    for scheme in state.schemes.values():
        scheme.shutdown()
    if state.pipe is not None:
        state.pipe.close()
    start_over(state)


def hold(state, held=True):
    state.held = held


def receive(state, model_id="policy", timeout=0.001):
    return state.receivers[model_id].receive(timeout=timeout)


def look(state, model_id="policy"):
    return ask(state.models[model_id])


def version(state, model_id="policy"):
    return state.receivers[model_id].version


# ---- dying at a given step


def die_at_ack(state, share, note):
    """Receive; when the model has the weights, note them in a file, write this share of the ack, and die."""

    def die(pipe, frame):
        Path(note).write_text(str(look(state)))
        os.write(pipe.fd, frame[: int(share * len(frame))])
        os.kill(os.getpid(), signal.SIGKILL)

    Pipe.send = die
    receive(state, timeout=600)
