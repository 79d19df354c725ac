"""What the workers of the conformance suite do when the test calls them."""

from __future__ import annotations

import os
import signal
import struct
from multiprocessing import connection, reduction
from pathlib import Path

import torch
from tensordict import TensorDict

from shmsync.schemes.pipe import Pipe
from support import holdings
from support.conformance.contexts import Failing, Lookup, Stubborn
from support.conformance.nets import Stamped, ask

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


def count(state, model_id="policy"):
    """What one of the buffers is filled with."""
    look(state, model_id)
    return int(state.models[model_id].count[0])


def receive_and_look(state):
    return receive(state, timeout=60), look(state)


def join_with_tensordict(state, scheme):
    """The worker's model is a TensorDict, not a module."""
    state.models["policy"] = TensorDict.from_module(Stamped(0)).data.clone()
    scheme.init_on_worker("policy", model=state.models["policy"], **state.given)
    keep(state, "policy", scheme)


def values(state):
    return sorted({float(value) for leaf in state.models["policy"].values(True, True) for value in leaf.view(-1)})


def version(state, model_id="policy"):
    return state.receivers[model_id].version


# ---- a worker with a context


def join_with_context(state, scheme, model_id, make, *args):
    """The worker knows its pipe and its model through a context alone."""
    state.models[model_id] = make(*args)
    state.context = Lookup(models=dict(state.models), worker_idx=state.index, **state.given)
    scheme.init_on_worker(model_id, state.context)
    keep(state, model_id, scheme)


def join_failing(state, scheme, model_id, *, unpicklable=False):
    state.models[model_id] = Stamped()
    error = Stubborn(1, 2) if unpicklable else ZeroDivisionError("no such model")
    state.context = Failing(model=state.models[model_id], error=error, ready=False, **state.given)
    scheme.init_on_worker(model_id, state.context)
    state.context.ready = True
    keep(state, model_id, scheme)


def mend(state):
    state.context.error = None
    hold(state, False)


# ---- messages of the worker's own


def pending(state, model_id="policy"):
    return state.receivers[model_id]._transport.pending()


def raw_recv(state):
    """The next message, for a program without shmsync; tensors as lists."""

    def plain(value):
        if isinstance(value, tuple):
            return tuple(plain(inner) for inner in value)
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return plain(state.pipe.recv())


def raw_send(state, message):
    state.pipe.send(message)


def raw_attach(state):
    """Follow a registration by hand: what it says, and the first number of the weights that came with it."""
    (model_id, state.weights), word = state.pipe.recv()
    return model_id, word, int(state.weights["count"][0])


def raw_look(state):
    return int(state.weights["count"][0])


def raw_detach(state):
    state.weights = None


# ---- memory


def mapping_of_weights(state):
    """(permissions, inode, path) of the pages where the model's weights are."""
    return holdings.mapping_at(state.models["policy"].layer.weight.data_ptr())


def slow_forward(state):
    """Tell the trainer that a forward runs, and stay in it until the next weights have been announced."""

    def go():
        state.pipe.send("inside")
        connection.wait([state.pipe])

    with torch.no_grad():
        return state.models["policy"](go)


# ---- dying at a given step


def die_at_ack(state, share, note):
    """Receive; when the model has the weights, note them in a file, write this share of the ack, and die."""

    def die(pipe, payload):
        Path(note).write_text(str(look(state)))
        frame = struct.pack("!i", len(payload)) + payload
        os.write(pipe.fd, frame[: int(share * len(frame))])
        os.kill(os.getpid(), signal.SIGKILL)

    Pipe.send = die
    receive(state, timeout=600)
