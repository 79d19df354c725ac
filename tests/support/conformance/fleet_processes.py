"""Fleets whose trainer is a process too: torch.distributed, with RPC or without, is begun once in a process."""

from __future__ import annotations

import itertools
import os
import tempfile
from functools import partial

from support.conformance import peers, remote_peers, remote_trainer
from support.conformance.fleet import RemoteFleet, can_go_on
from support.conformance.remote_trainer import Remote
from support.remote import parts
from support.worker import Worker, fork_server, nothing

WORKERS = 3
SIZE = 1 + WORKERS + 1  # the trainer, workers, and one that takes the place of the dead


class World:
    """A trainer and workers that are connected for life. Worker i of a fleet is rank i + 1 at first."""

    between = None

    def __init__(self, context):
        self.ranks = [Worker(context, self.between if rank else None) for rank in range(SIZE)]
        self.connect()

    @property
    def trainer(self):
        return self.ranks[0]

    def connect(self):
        raise NotImplementedError

    def everybody(self, function, *args):
        """All ranks at once: function(state, rank, size, *args)."""
        for rank, worker in enumerate(self.ranks):
            worker.start(function, rank, SIZE, *args)
        for worker in self.ranks:
            worker.result()

    def usable(self):
        """After a test: do all processes live and answer?"""
        leave = [nothing, *[remote_peers.leave] * (SIZE - 1)]  # the trainer has nothing to forget
        return all(map(can_go_on, self.ranks, leave))

    def close(self):
        for worker in self.ranks:
            worker.resume()
            worker.end()


class RPCWorld(World):
    def connect(self):
        with tempfile.TemporaryDirectory() as folder:
            self.everybody(remote_peers.join_rpc, os.path.join(folder, "init"))


class DistributedWorld(World):
    between = staticmethod(peers.receive_until_called)

    def connect(self):
        self.everybody(parts.join_group, "127.0.0.1", self.trainer.call(parts.host_store, "127.0.0.1"))


class WorldCrew:
    """A world of one kind, used by one test after the other: one takes seconds to start."""

    def __init__(self, kind):
        self._kind = kind
        self._context = fork_server()
        self._world = None

    def take(self):
        world, self._world = self._world or self._kind(self._context), None
        return world

    def give_back(self, world):
        if world.usable():
            self._world = world
        else:
            world.close()

    def close(self):
        if self._world is not None:
            self._world.close()
            self._world = None


class WorldFleet(RemoteFleet):
    """`nodes`: what the workers call their node; None: they are on the trainer's."""

    def __init__(self, entry, crew, nodes=()):
        super().__init__(entry, crew)
        self.relayed = any(nodes)
        self.world = crew.take()
        for rank, node in itertools.zip_longest(self.world.ranks[1:], nodes):
            rank.call(remote_peers.name_node, node)
        self.ranks = list(range(1, 1 + WORKERS))
        self.workers = self.world.ranks[1 : 1 + WORKERS]
        for index in range(WORKERS):
            self.begin(index)

    def begin(self, index):
        """Prepare a worker for this test."""
        self.workers[index].call(remote_peers.begin, index)

    def make(self, *, alone=False, **options):
        return Remote(super().make(alone=alone, **options), self.world.trainer)

    def init_sender(self, scheme, model_id="policy", **kwargs):
        self.schemes.append(scheme)
        scheme.init_on_sender(model_id, **{**self.given(model_id), **kwargs})

    def given(self, model_id):
        """What init_on_sender() gets."""
        raise NotImplementedError

    def replace(self, index):
        self.ranks[index] = SIZE - 1
        self.workers[index] = self.world.ranks[SIZE - 1]
        self.begin(index)

    def close(self):
        super().close()
        self.crew.give_back(self.world)


class RPCFleet(WorldFleet):
    called = True

    def given(self, model_id):
        infos, rrefs = (partial(getattr(remote_trainer, name), self.ranks, model_id) for name in ("infos", "rrefs"))
        return {"collector_infos": infos, "collector_rrefs": rrefs, "collector_class": remote_peers.Collector}

    def register(self, sender, index):
        self.world.trainer.call(remote_trainer.change_roster, sender.model_id, index, self.ranks[index])


class DistributedFleet(WorldFleet):
    _numbers = itertools.count()

    def __init__(self, entry, crew, nodes=()):
        self.number = next(self._numbers)
        super().__init__(entry, crew, nodes)

    def begin(self, index):
        self.workers[index].call(remote_peers.begin_rank, index, self.ranks[index], self.number)

    def given(self, model_id):
        return {"store": partial(remote_trainer.store, self.number), "ranks": self.ranks}

    def register(self, sender, index):
        self.world.trainer.call(remote_trainer.register_rank, sender.key, index, self.ranks[index], self.number)
