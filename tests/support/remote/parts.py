"""A trainer and workers that speak torch.distributed or torch.distributed.rpc, and what they do in these tests.

Every one of them is a process: an RPC agent has only one life in a process, and a process group is for its whole
process. So the trainer is a Worker too, and the test itself only says who does what.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket

import torch.distributed as dist
from torch.distributed import rpc

from shmsync import DistributedWeightSyncScheme, RPCWeightSyncScheme
from support.conformance.contexts import Context
from support.processes import remove_segments
from support.remote import transports
from support.remote.members import FOR_EVER, Member, linear, look, make_collector, make_member
from support.weights import fill
from support.worker import Worker, serve

SCHEMES = {"rpc": RPCWeightSyncScheme, "distributed": DistributedWeightSyncScheme}


class Fleet:
    """`fleet.trainer` and `fleet.workers`; worker 0 is rank 1.

    Args:
        make: the `start` fixture.
        nodes: what each worker calls its node; None for one that says nothing.
        home: what the trainer calls its node.
    """

    def __init__(self, make, count, *, nodes=(), home=None):
        self.trainer, *self.workers = make(count + 1)
        self.everybody = [self.trainer, *self.workers]
        for worker, node in zip(self.everybody, [home, *nodes], strict=False):
            if node is not None:
                worker.call(set_environment, SHMSYNC_NODE=node)

    def add(self, worker):
        """One that was not made by `make`."""
        self.workers.append(worker)
        self.everybody.append(worker)

    def connect(self, kind, host="127.0.0.1", *, keeper=None):
        """Make the process group or the agents. `keeper`: a Worker that has the store, instead of the trainer."""
        self.kind = kind
        port = (self.trainer if keeper is None else keeper).call(free_port if kind == "rpc" else host_store, host)
        for rank, worker in enumerate(self.everybody):
            worker.start(join_rpc if kind == "rpc" else join_group, rank, len(self.everybody), host, port)
        for worker in self.everybody:
            worker.result()
        return self

    def open(self, size=500, *, loop=True, workers=None, **options):
        """Make the scheme, with its sender and its receivers. `loop`: do ranks receive by themselves? `workers`: the
        sender knows so many; None: all."""
        if self.kind == "distributed":
            for worker in self.workers:
                worker.call(make_member, size, loop, **options)
        count = len(self.workers) if workers is None else workers
        self.trainer.call(make_sender, self.kind, count, size, **{"timeout": FOR_EVER, **options})
        return self

    def open_transport(self, size=500, timeout=FOR_EVER):
        """The trainer has a transport to worker 0, which has a receiver for a model of this size; RPC: or a Keeper."""
        if self.kind == "rpc":
            self.trainer.call(transports.open_rpc_transport, size, timeout)
        else:
            self.trainer.call(transports.open_transport, 1, timeout=timeout)
        return self

    def send(self, value, **kwargs):
        """The trainer sends a model that is `value` everywhere; the version."""
        return self.trainer.call(send, value, **kwargs)

    def look(self, *who):
        """(value, version) of these workers; None: all."""
        return [self.workers[index].call(look) for index in who or range(len(self.workers))]

    def end(self):
        """Kill them all, and remove what they had in /dev/shm."""
        for worker in self.everybody:
            if worker.process.is_alive():
                worker.kill()
            remove_segments(worker.pid)


class ElsewhereWorker(Worker):
    """In a separate process namespace, as on another machine: its pid means nothing to others."""

    def __init__(self, context):
        super().__init__(context, target=serve_elsewhere)
        self.pid = self.conn.recv()


def serve_elsewhere(conn, between):
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result):
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    checked(libc.unshare(0x20020000))  # CLONE_NEWPID, for the children, and CLONE_NEWNS
    child = os.fork()
    if child:
        conn.send(child)
        conn.close()  # so that its end tells of the death of the child
        os.waitpid(child, 0)
        return
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    checked(libc.mount(None, b"/", None, 0x44000, None))  # MS_REC | MS_PRIVATE: the next ones are seen here alone
    checked(libc.mount(b"proc", b"/proc", b"proc", 0, None))
    checked(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None))
    serve(conn, between)
    os._exit(0)


# ---- in every process


def set_environment(state, **variables):
    os.environ.update(variables)


def free_port(state, host):
    """A port that no process gets by asking for any: other tests connect meanwhile, until the agents listen."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port


def host_store(state, host):
    state.hosted = state.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return state.hosted.port


def join_group(state, rank, size, host, port):
    state.store = dist.TCPStore(host, port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", state.store), rank=rank, world_size=size)


def join_rpc(state, rank, size, host, port):
    # TCP alone: between namespaces of one machine TensorPipe would find ways around the network.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{host}:{port}", _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def store(state, call, *args):
    return getattr(state.store, call)(*args)


# ---- the trainer


def make_sender_with(state, size, *, own_store=False, **arguments):
    """Of the distributed scheme, with nothing but these arguments."""
    state.model = linear(size)
    state.scheme = DistributedWeightSyncScheme(timeout=FOR_EVER)
    if own_store:
        arguments["store"] = state.store
    init_sender(state, arguments)


def init_sender(state, arguments):
    state.scheme.init_on_sender("policy", model=state.model, **arguments)
    state.sender = state.scheme.get_sender()


def make_sender(state, kind, count, size, *, context=False, **options):
    """`count`: so many workers are there at first. `context`: the sender finds them in an object."""
    state.model = linear(size)
    state.scheme = SCHEMES[kind](**options)
    if kind == "rpc":
        roster = {"collector_infos": [], "collector_rrefs": [], "collector_class": Member}
        state.roster = Context(**roster)
        for rank in range(1, count + 1):
            add_collector(state, rank, size)
        arguments = {"context": state.roster} if context else roster
    else:
        arguments = {"store": state.store, "num_workers": count}
    init_sender(state, arguments)


def make_sender_anew(state, kind, **options):
    """As a trainer that was started again has it, for the same workers."""
    state.scheme.shutdown()
    state.scheme = SCHEMES[kind](timeout=FOR_EVER, **options)
    init_again(state, kind)


def init_again(state, kind):
    """init_on_sender() of the scheme that has a sender already, with the same workers."""
    count = len(state.sender.worker_ids)
    init_sender(state, {"context": state.roster} if kind == "rpc" else {"store": state.store, "num_workers": count})


def add_collector(state, rank, size, name="policy"):
    state.roster.collector_infos.append(rpc.get_worker_info(f"w{rank}"))
    state.roster.collector_rrefs.append(rpc.rpc_sync(f"w{rank}", make_collector, args=(state.scheme, size, name)))


def remove_collector(state, index):
    del state.roster.collector_infos[index], state.roster.collector_rrefs[index]


def replace(state, index, rank, size):
    """Let this rank be the worker of this index."""
    if hasattr(state, "roster"):
        state.roster.collector_infos[index] = rpc.get_worker_info(f"w{rank}")
        state.roster.collector_rrefs[index] = rpc.rpc_sync(f"w{rank}", make_collector, args=(state.scheme, size))
    else:
        state.sender.register_worker(index, (state.store, rank))


def send_what_does_not_fit(state):
    state.sender.send(linear(3))


def send(state, value, workers=None, **kwargs):
    fill(state.model, value)
    return state.sender.send(None, workers, **kwargs)


def send_async(state, value):
    fill(state.model, value)
    return state.sender.send_async()


def wait_async(state, **kwargs):
    return state.sender.wait_async(**kwargs)


def make_two_senders(state):
    state.senders = []
    for name in ("policy", "env.value_net"):
        scheme = DistributedWeightSyncScheme(timeout=FOR_EVER)
        scheme.init_on_sender(name, store=state.store, num_workers=1)
        state.senders.append(scheme.get_sender())


def send_two_models(state, value):
    """One after the other; the second has half more everywhere."""
    for sender, size, more in zip(state.senders, (500, 300), (0.0, 0.5), strict=True):
        sender.send(linear(size, value + more))


def dead(state):
    return [index for index in state.sender.worker_ids if state.sender.is_dead(index)]


def shut_down(state):
    state.scheme.shutdown()
