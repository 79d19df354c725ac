"""A trainer and workers that speak torch.distributed or torch.distributed.rpc, and what they do in these tests.

Every one is a process of its own: an RPC agent has one life in a process, and a process group is for its whole process.
The test itself only says who does what. Worker 0 is rank 1.
"""

from __future__ import annotations

import os
import random
import socket
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from shmsync import DistributedWeightSyncScheme, RPCWeightSyncScheme
from shmsync.schemes.remote import nodes
from support.processes import mapping_at
from support.weights import fill

SCHEMES = {"rpc": RPCWeightSyncScheme, "distributed": DistributedWeightSyncScheme}
FOR_EVER = 3600.0  # a call that waited so long would run into the test's watchdog


def linear(value=0.0, size=500):
    return fill(nn.Linear(size, 4), value)


class Fleet:
    """`fleet.trainer` and `fleet.workers`, connected. `nodes`: SHMSYNC_NODE of the trainer and of each worker."""

    def __init__(self, make, kind, count, nodes=()):
        self.kind = kind
        self.trainer, *self.workers = everybody = make(count + 1)
        for process, node in zip(everybody, nodes, strict=False):
            process.call(set_node, node)
        port = self.trainer.call(free_port if kind == "rpc" else host_store)
        for rank, process in enumerate(everybody):
            process.start(join_rpc if kind == "rpc" else join_group, rank, len(everybody), port)
        for process in everybody:
            process.result()

    def open(self, workers=None, *, loop=True, meta=(), **options):
        """Make the scheme, its sender and its receivers. `loop`: ranks receive on a thread of their own.

        `meta`: the workers whose modules are made on the meta device.
        """
        count = len(self.workers) if workers is None else workers
        if self.kind == "distributed":
            for index, worker in enumerate(self.workers):
                worker.call(make_rank, loop, index in meta, options)
        self.trainer.call(make_sender, self.kind, count, {"timeout": FOR_EVER, **options})
        return self

    def send(self, value, **kwargs):
        return self.trainer.call(send, value, **kwargs)

    def look(self, *who):
        """(value, version) of these workers, by default of all."""
        return [self.workers[index].call(look) for index in who or range(len(self.workers))]

    def leader(self):
        """The index of the worker that publishes for its node; only one may. The first to say where it runs leads."""
        (found,) = [index for index, worker in enumerate(self.workers) if worker.call(leads)]
        return found


# ---- in every process


def set_node(state, node):
    os.environ["SHMSYNC_NODE"] = node


def free_port(state):
    """A port that no process gets by asking for any."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def host_store(state):
    state.hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return state.hosted.port


def join_group(state, rank, size, port):
    state.store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", state.store), rank=rank, world_size=size)


def join_rpc(state, rank, size, port):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def store(state, call, *args):
    return getattr(state.store, call)(*args)


# ---- a worker

mine = None  # the Member of this process


class Member:
    """What a worker has. For RPC it is the collector class."""

    def __init__(self, scheme, *, meta=False, **arguments):
        global mine
        mine = self
        self.model = nn.Linear(500, 4, device="meta") if meta else linear()
        scheme.init_on_worker("policy", model=self.model, **arguments)
        self.receiver = scheme.get_receiver()
        self.applied = []  # versions

    @staticmethod
    def update_policy_weights_(rref, weights):
        self = rref.local_value()
        self.receiver.apply_weights(weights)
        self.applied.append(self.receiver.version)

    def loop(self):
        while True:
            if self.receiver.receive(0.1):
                self.applied.append(self.receiver.version)


def make_collector(scheme):
    return rpc.RRef(Member(scheme))


def make_rank(state, loop, meta, options):
    scheme = DistributedWeightSyncScheme(timeout=FOR_EVER, **options)
    member = Member(scheme, meta=meta, store=state.store, rank=dist.get_rank())
    if loop:
        threading.Thread(target=member.loop, daemon=True).start()


def receive(state, timeout=FOR_EVER):
    return mine.receiver.receive(timeout)


def look(state):
    """(value, version) by a forward; two values for weights that are torn."""
    with torch.no_grad():
        outputs = mine.model(torch.ones(500)) / 501
    low, high = outputs.min().item(), outputs.max().item()
    return round(low, 3) if low == high else (low, high), mine.receiver.version


def applied(state):
    return mine.applied


def leads(state):
    return bool(nodes._led)


def memory(state):
    """(permissions, inode) of the memory in which the model's weights lie."""
    return mapping_at(mine.model.weight.data_ptr())[:2]


# ---- the trainer


def make_sender(state, kind, count, options):
    state.model = linear()
    state.scheme = SCHEMES[kind](**options)
    if kind == "rpc":
        ranks = range(1, count + 1)
        infos, rrefs = [rpc.get_worker_info(f"w{rank}") for rank in ranks], [collector(state, rank) for rank in ranks]
        arguments = {"collector_infos": infos, "collector_rrefs": rrefs, "collector_class": Member}
    else:
        arguments = {"store": state.store, "num_workers": count}
    state.scheme.init_on_sender("policy", model=state.model, **arguments)
    state.sender = state.scheme.get_sender()


def collector(state, rank):
    return rpc.rpc_sync(f"w{rank}", make_collector, args=(state.scheme,))


def replace(state, index, rank):
    """Let this rank be the worker of this index."""
    if isinstance(state.scheme, RPCWeightSyncScheme):
        worker = (rpc.get_worker_info(f"w{rank}"), collector(state, rank), Member)
    else:
        worker = (state.store, rank)
    state.sender.register_worker(index, worker)


def send(state, value, *, workers=None, timeout=None):
    fill(state.model, value)
    return state.sender.send(worker_ids=workers, timeout=timeout)


def change(state, value):
    """The trainer goes on."""
    fill(state.model, value)


def send_async(state, value):
    fill(state.model, value)
    return state.sender.send_async()


def wait_async(state, timeout=None):
    return state.sender.wait_async(timeout=timeout)


def resend(state, workers=None):
    fill(state.model, -1.0)  # it is not read again
    return state.sender.resend(workers)


def send_what_does_not_fit(state):
    return state.sender.send({"weight": torch.zeros(4, 500), "bias": torch.zeros(3)})


def send_a_part(state):
    return state.sender.send({"weight": torch.zeros(4, 500)})
