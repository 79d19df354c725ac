"""Actors of the tests with Ray, and what those tests ask Ray and the kernel. Ray's workers import this module."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import ray
import torch
from torch import nn

from support.holdings import mapping_at
from support.processes import PATIENCE, until
from support.weights import fill

SIZE = 256  # a net is 257 KiB: more than Ray would put into its messages
OPTIONS = {
    "log_to_driver": False,
    "logging_level": "ERROR",
    "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
}
SYSTEM = {
    "worker_niceness": 0,  # by default Ray's workers come last, behind all tests that run beside these
    # When Ray's head is slow to hear of a death, calls wait for it so long, and only then say "unavailable".
    "timeout_ms_task_wait_for_death_info": 10_000,
}


_ends = []


def instead_of_the_last(end):
    """End the last Ray: it runs once in a process. `end()`: ends the one that begins now; more than once, too."""
    while _ends:
        _ends.pop()()
    _ends.append(end)


@contextlib.contextmanager
def one_node():
    """Ray on this machine, for many tests: starting it costs seconds, so one that is there already is used."""
    if ray.is_initialized():
        yield
        return
    instead_of_the_last(ray.shutdown)
    ray.init(
        "local", num_cpus=1, object_store_memory=256 << 20, include_dashboard=False, _system_config=SYSTEM, **OPTIONS
    )
    session = _session()
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(session, ignore_errors=True)


def _session():
    """The folder of Ray's logs."""
    return ray._private.worker.global_worker.node.get_session_dir_path()


# ---- what they hold


def net(value=0.0, size=SIZE):
    """A net whose parameters are all `value`."""
    return fill(nn.Linear(size, size), value)


def value_of(module):
    """What all parameters of a net() are, by a forward pass."""
    size = module.in_features
    with torch.no_grad():
        outputs = module(torch.ones(size)) / (size + 1)
    assert outputs.min() == outputs.max()
    return outputs[0].item()


class Process:
    """What all actors of these tests can be asked."""

    def pid(self):
        return os.getpid()

    def hold(self, path):
        """Be busy until there is a file of this name."""
        until(Path(path).exists)


class Worker(Process):
    """An actor with one net for each scheme, which are given by model id."""

    def __init__(self, schemes, size=SIZE):
        torch.set_num_threads(1)
        self.nets = {model_id: net(0.0, size) for model_id in schemes}
        for model_id, scheme in schemes.items():
            scheme.init_on_worker(model_id, model=self.nets[model_id])
        self.receivers = {model_id: scheme.get_receiver() for model_id, scheme in schemes.items()}
        self.calls = 0

    def update_policy_weights_(self, policy_or_weights):
        self.calls += 1
        label = getattr(policy_or_weights, "label", None)
        self.receivers[label.model_id if label else "policy"].apply_weights(policy_or_weights)

    def look(self, model_id="policy"):
        """(value, version) of what it uses now."""
        return value_of(self.nets[model_id]), self.receivers[model_id].version

    def count(self):
        """How often it was given weights."""
        return self.calls

    def used(self, model_id="policy"):
        """The mapping in which the weights lie that its net uses."""
        return mapping_at(self.nets[model_id].weight.data_ptr())


class ModuleActor(Process):
    """What a RayModuleTransform has for an actor, as far as weights go."""

    def __init__(self, schemes, size=SIZE):
        torch.set_num_threads(1)
        ((model_id, scheme),) = schemes.items()
        self.module = net(0.0, size)
        scheme.init_on_worker(model_id, context=self)  # which has the module as .module
        self.receiver = scheme.get_receiver()

    def _update_weights_tensordict(self, params):
        self.receiver.apply_weights(params)

    def _update_weights_state_dict(self, state_dict):
        self.receiver.apply_weights(state_dict)

    def look(self):
        return value_of(self.module), self.receiver.version


# ---- starting and asking them


def start(schemes, count=1, *, kind=Worker, size=SIZE, **options):
    """Actors, when all of them are there. `schemes`: by model id, or one for "policy"."""
    schemes = schemes if isinstance(schemes, dict) else {"policy": schemes}
    remote = ray.remote(num_cpus=0)(kind).options(**options)
    actors = [remote.remote(schemes, size) for _ in range(count)]
    pids(actors)
    return actors


def ask(actors, method, *args):
    """What each of them answers."""
    return ray.get([getattr(actor, method).remote(*args) for actor in actors], timeout=PATIENCE)


def pids(actors):
    return ask(actors, "pid")


# ---- what happens to them


def end(actors):
    """For actors of one test."""
    for actor in actors:
        ray.kill(actor)
