"""What the workers of remote_parts have and do."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from shmsync import DistributedWeightSyncScheme, Publisher
from support.holdings import mapping_at
from support.processes import until
from support.weights import fill

FOR_EVER = 3600.0  # a send that waited for this deadline would run into the test's watchdog


def linear(size, value=0.0):
    return fill(nn.Linear(size, 4), value)


members = {}  # of this process, by name


class Trouble(Exception):
    """What a worker of these tests raises."""


class Member:
    """What a worker has. For RPC it is the collector class."""

    def __init__(self, scheme, size, name="policy", model_id="policy", **arguments):
        self.model = linear(size)
        scheme.init_on_worker(model_id, model=self.model, **arguments)
        self.receiver = scheme.get_receiver()
        self.applied = []  # versions
        self.errors = []
        members[name] = self

    @staticmethod
    def update_policy_weights_(rref, weights):
        self = rref.local_value()
        self.receiver.apply_weights(weights)
        self.applied.append(self.receiver.version)

    def loop(self):
        """Receive on a separate thread, so that the worker still answers the test."""
        try:
            while True:
                if self.receiver.receive(0.1):
                    self.applied.append(self.receiver.version)
        except Exception as error:
            self.errors.append(type(error).__name__)


def make_collector(scheme, size, name="policy"):
    return rpc.RRef(Member(scheme, size, name))


def make_member(state, size, loop=True, model_id="policy", **options):
    """A receiver of the distributed scheme, and unless told otherwise a thread that receives."""
    scheme = DistributedWeightSyncScheme(**{"timeout": FOR_EVER, **options})
    member = Member(scheme, size, model_id, model_id, store=state.store, rank=dist.get_rank())
    if loop:
        threading.Thread(target=member.loop, daemon=True).start()


def make_member_of_the_group(state, size):
    """A member that is given only its model."""
    member = Member(DistributedWeightSyncScheme(timeout=FOR_EVER), size)
    threading.Thread(target=member.loop, daemon=True).start()


def look(state, name="policy"):
    """(value, version); two values for weights that are torn."""
    member = members[name]
    low, high = (float(bound) for bound in torch.aminmax(member.model.weight.detach()))
    return (low if low == high else (low, high)), member.receiver.version


def attribute(state, what, name="policy"):
    return getattr(members[name], what)


def wait_applied(state, version):
    until(lambda: version in members["policy"].applied)


def receive(state, timeout, name="policy"):
    return members[name].receiver.receive(timeout)


def take_unanswered(state):
    """Receive a message of the scheme, and do not answer."""
    return members["policy"].receiver.transport.receive_weights(timeout=FOR_EVER)[0]


def can_write(pid, inode):
    """Does this process map that memory to write to it?"""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return re.search(rf"^\S+ rw-s \S+ \S+ {inode} ", maps, re.M) is not None


def die_as_relay(state):
    """Die at the first thing that a sender asks this worker to publish."""
    Publisher.__init__ = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)


def mapping(state):
    """(permissions, inode, path) of the memory that the model's weights lie in."""
    return mapping_at(members["policy"].model.weight.data_ptr())
