"""Actors of the tests with Ray, and what those tests ask Ray and the kernel. Ray's workers import this module."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from pathlib import Path

import psutil
import ray
import torch
from ray._private import state
from ray.cluster_utils import Cluster
from torch import nn

from support.holdings import mapping_at
from support.processes import PATIENCE, until
from support.weights import fill

SIZE = 256  # a net is 257 KiB: more than Ray would put into its messages
CHUNK = 64 << 10  # bytes that Ray's object managers send at a time here
OPTIONS = {
    "log_to_driver": False,
    "logging_level": "ERROR",
    "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
}
SYSTEM = {
    "worker_niceness": 0,  # by default Ray's workers come last, behind all tests that run beside these
    # When Ray's head is slow to hear of a death, calls wait for it so long, and only then say "unavailable".
    "timeout_ms_task_wait_for_death_info": 10_000,
    # Each raylet writes what its store did into its log, by default once a minute.
    "event_stats_print_interval_ms": 100,
    "object_manager_default_chunk_size": CHUNK,
}


_ends = []


def instead_of_the_last(end):
    """End the last Ray: it runs once in a process. `end()`: ends the one that begins now; more than once, too."""
    while _ends:
        _ends.pop()()
    _ends.append(end)


@contextlib.contextmanager
def one_node():
    """Ray on this machine, for many tests: starting it costs seconds."""
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


@contextlib.contextmanager
def two_nodes():
    """The same as two nodes, "near" with this process on it, and "far". Gives their ids by these names."""
    with cluster({"near": 100}) as made:
        add_node(made, {"far": 100})
        ray.init(made.address, **OPTIONS)
        yield {name: node["NodeID"] for node in ray.nodes() for name in ("near", "far") if name in node["Resources"]}


def add_node(made, resources):
    return made.add_node(num_cpus=1, object_store_memory=256 << 20, resources=resources)


@contextlib.contextmanager
def cluster(resources):
    """Nodes on this machine, of which there is only the head yet, with these resources. ray.init() is the caller's."""
    instead_of_the_last(ray.shutdown)
    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {"num_cpus": 1, "object_store_memory": 256 << 20, "resources": resources, "_system_config": SYSTEM}
    made = Cluster(initialize_head=True, head_node_args=head)
    session = made.head_node.get_session_dir_path()
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
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
        self.ignores = False
        self.source = None

    def update_policy_weights_(self, policy_or_weights):
        self.calls += 1
        if self.ignores:
            return
        if isinstance(policy_or_weights, dict):
            self.source = mapping_at(policy_or_weights["weight"].data_ptr())
        stamp = getattr(policy_or_weights, "stamp", None)
        self.receivers[stamp.model_id if stamp else "policy"].apply_weights(policy_or_weights)

    def look(self, model_id="policy"):
        """(value, version) of what it uses now."""
        return value_of(self.nets[model_id]), self.receivers[model_id].version

    def count(self):
        """How often it was given weights."""
        return self.calls

    def given(self):
        """The mapping in which the last weights that it was given lie."""
        return self.source

    def used(self, model_id="policy"):
        """The mapping in which the weights lie that its net uses."""
        return mapping_at(self.nets[model_id].weight.data_ptr())

    def ignore(self, ignores):
        """Apply nothing from now on, or apply again."""
        self.ignores = ignores


class ModuleActor(Process):
    """What a RayModuleTransform has for an actor, as far as weights go."""

    def __init__(self, schemes, size=SIZE):
        torch.set_num_threads(1)
        ((model_id, scheme),) = schemes.items()
        self.module = net(0.0, size)
        scheme.init_on_worker(model_id, context=self)  # which has the module as .module
        self.receiver = scheme.get_receiver()
        self.methods = []

    def _update_weights_tensordict(self, params):
        self.methods.append(("tensordict", type(params).__name__))
        self.receiver.apply_weights(params)

    def _update_weights_state_dict(self, state_dict):
        self.methods.append(("state_dict", type(state_dict).__name__))
        self.receiver.apply_weights(state_dict)

    def look(self):
        return value_of(self.module), self.receiver.version

    def called(self):
        """Which methods, with what, since the last time."""
        return [self.methods.pop(0) for _ in list(self.methods)]


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


# ---- what Ray says


def actors_of_class(name):
    """The pids of those that are alive, by actor id."""
    table = state.state.actor_table(None)
    return {each: row["Pid"] for each, row in table.items() if (row["ActorClassName"], row["State"]) == (name, "ALIVE")}


def head_pid():
    """Of the process that knows of all nodes and actors."""
    return _the_pid("gcs_server", lambda words: any(_session() in word for word in words))


def store_pid():
    """Of the process that has this node's object store."""
    node = f"--node_id={ray.get_runtime_context().get_node_id()}"
    return _the_pid("raylet", lambda words: node in words)


def _the_pid(name, wanted):
    """Of the one process of this name whose command line is wanted; those of other clusters may end meanwhile."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too
            if each.name() == name and wanted(each.cmdline()):
                found.append(each.pid)
    (pid,) = found
    return pid


def traffic():
    """By node: (bytes of objects made in its store, bytes that its store got from other nodes, rounded up to CHUNK)."""
    begins = {log: log.stat().st_size for log in Path(_session(), "logs").glob("raylet*.out")}
    return dict(_traffic(log, begin) for log, begin in begins.items())


def objects_of_three(send):
    """How many objects of the size of a net() three calls of `send(net)` put into the store of the only node."""
    send(net(1.0))  # with what is made once
    ((before, _),) = traffic().values()
    for value in (2.0, 3.0, 4.0):
        send(net(value))
    ((after, _),) = traffic().values()
    return (after - before) / ((SIZE + 1) * SIZE * 4)  # and Ray's own small objects, and the layout of the weights


def _traffic(log, begin):
    node = re.search(r"Setting node ID node_id=(\w+)", log.read_text())[1]
    while True:
        with log.open() as file:
            file.seek(begin)
            text = file.read()
        made = re.findall(r"num bytes created total: (\d+)\n", text)
        chunks = re.findall(r"num chunks received total: (\d+)\n", text)
        if len(made) > 1 and len(chunks) > 1:  # the first may have been written before
            return node, (int(made[1]), int(chunks[1]) * CHUNK)
        time.sleep(0.02)
