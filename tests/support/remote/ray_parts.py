"""Actors of the tests with Ray, and what those tests ask Ray and the kernel. Ray's workers import this module.

Starting Ray takes seconds, and starting an actor imports torch: a session has one Ray, and few actors, which take part
in one test after the other.
"""

from __future__ import annotations

import os
from pathlib import Path

import ray
import torch
from torch import nn

from support.processes import PATIENCE, kill, mapping_at, until
from support.weights import fill

SIZE = 256  # a net is 257 KiB: more than Ray would put into its messages
SYSTEM = {
    "worker_niceness": 0,  # by default Ray's workers come last, behind all tests that run beside these
    # When Ray's head is slow to hear of a death, calls wait for it so long, and only then say "unavailable".
    "timeout_ms_task_wait_for_death_info": 10_000,
}
_crew = []  # the living actors


# ---- what they hold


def net(value=0.0):
    """A net whose parameters are all `value`."""
    return fill(nn.Linear(SIZE, SIZE), value)


def value_of(module):
    """What all parameters of a net() are, by a forward pass."""
    with torch.no_grad():
        outputs = module(torch.ones(SIZE)) / (SIZE + 1)
    assert outputs.min() == outputs.max()
    return outputs[0].item()


class Actor:
    """Has a net and a receiver for each scheme, which are given by model id."""

    def __init__(self):
        torch.set_num_threads(1)
        self.receivers = {}

    def begin(self, schemes, node):
        """Begin a test, on the node of this name."""
        for receiver in self.receivers.values():
            receiver.close()
        os.environ["SHMSYNC_NODE"] = node
        self.nets = {model_id: net() for model_id in schemes}
        (self.module, *_) = self.nets.values()  # where RayModuleTransformScheme looks for it
        for model_id, scheme in schemes.items():
            found = {"model": self.nets[model_id]} if model_id == "policy" else {"context": self}
            scheme.init_on_worker(model_id, **found)
        self.receivers = {model_id: scheme.get_receiver() for model_id, scheme in schemes.items()}
        self.calls = 0

    def update_policy_weights_(self, policy_or_weights):
        self.calls += 1
        label = getattr(policy_or_weights, "label", None)
        self.receivers[label.model_id if label else "policy"].apply_weights(policy_or_weights)

    def _update_weights_tensordict(self, params):
        self.update_policy_weights_(params)

    def _update_weights_state_dict(self, state_dict):
        self.update_policy_weights_(state_dict)

    def look(self, model_id="policy"):
        """(value, version) of what it uses now."""
        return value_of(self.nets[model_id]), self.receivers[model_id].version

    def count(self):
        """How often it was given weights."""
        return self.calls

    def used(self):
        """The mapping in which the weights lie that its net uses."""
        return mapping_at(self.nets["policy"].weight.data_ptr())

    def pid(self):
        return os.getpid()

    def hold(self, path):
        """Be busy until there is a file of this name."""
        until(Path(path).exists)


# ---- starting, asking and killing them


def crew(schemes, nodes):
    """An actor for each of these names of nodes, ready. `schemes`: by model id, or one for "policy"."""
    schemes = schemes if isinstance(schemes, dict) else {"policy": schemes}
    made = ray.remote(num_cpus=0)(Actor)
    _crew.extend(made.remote() for _ in range(len(nodes) - len(_crew)))
    chosen = _crew[: len(nodes)]
    ray.get([actor.begin.remote(schemes, node) for actor, node in zip(chosen, nodes, strict=True)], timeout=PATIENCE)
    return chosen


def ask(actors, method, *args):
    """What each of them answers."""
    return ray.get([getattr(actor, method).remote(*args) for actor in actors], timeout=PATIENCE)


def kill_one(actor):
    """SIGKILL; its pid."""
    pid = ray.get(actor.pid.remote())
    _crew.remove(actor)
    kill(pid)
    return pid
