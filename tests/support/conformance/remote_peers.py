"""What workers on other machines do in the conformance suite, beside what all do; see peers.py."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

from torch import distributed
from torch.distributed import rpc

from shmsync.schemes.remote.packed_weights import stamp_of
from support.conformance import peers
from support.worker import answer


def begin(state, index, **given):
    """Be this worker of a fleet. `given`: what init_on_worker() gets."""
    if not hasattr(state, "models"):
        peers.start_over(state)
    state.index, state.given = index, given


def leave(state):
    """Forget everything, for the next test; also the threads that wait at the gate."""
    if not hasattr(state, "models"):
        peers.start_over(state)  # it was not used
    gate = state.gate
    with gate:
        peers.leave(state)  # it makes a new gate
        gate.notify_all()


# ---- weights that come in a call


def take_weights(state, weights):
    """Weights came: apply them, as soon as the test lets the worker receive."""
    model_id, gate = stamp_of(weights).model_id, state.gate

    def may_go_on():
        free = state.receiving or not state.held
        return state.gate is not gate or (free and model_id in state.receivers)

    with gate:
        gate.wait_for(may_go_on)
    if state.gate is not gate:
        return  # the test is over
    with state.using:
        receiver = state.receivers[model_id]
        receiver.apply_weights(weights)
    if not state.receiving:
        receiver.receive(timeout=0)  # the worker's loop has noticed


class Actor:
    """A worker of Ray. Its weights come in another concurrency group than the test's calls."""

    def __init__(self):
        self.state = SimpleNamespace(using=threading.Lock())
        peers.start_over(self.state)

    def call(self, function, args, kwargs):
        return answer(self.state, function, args, kwargs)

    def update_policy_weights_(self, policy_or_weights=None):
        take_weights(self.state, policy_or_weights)

    def _update_weights_tensordict(self, params):
        take_weights(self.state, params)


class Collector:
    """What an RPC worker has for each of its models."""

    state = None  # of the worker

    @staticmethod
    def update_policy_weights_(rref, weights):
        assert stamp_of(weights).model_id == rref.local_value().model_id
        take_weights(Collector.state, weights)

    def __init__(self, model_id):
        self.model_id = model_id


# ---- processes of a world; see fleet_processes.py


def name_node(state, node):
    """What this process calls its node in a test; None: it is on the trainer's."""
    os.environ.pop("SHMSYNC_NODE", None)
    if node is not None:
        os.environ["SHMSYNC_NODE"] = node


def join_rpc(state, rank, size, path):
    state.using = threading.Lock()
    Collector.state = state
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=60)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def begin_rank(state, index, rank, number):
    """Be this worker, with keys of the store that no other test has."""
    begin(state, index, store=distributed.PrefixStore(f"test{number}", state.store), rank=rank)
