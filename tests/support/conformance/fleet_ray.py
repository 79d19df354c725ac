"""Workers that are actors of Ray."""

from __future__ import annotations

import contextlib
import os
import select

import pytest

from support.conformance import remote_peers
from support.conformance.fleet import RemoteFleet, can_go_on
from support.processes import PATIENCE
from support.worker import Gone, RemoteTraceback, Worker


class Process:
    """A child of another process, with the interface of multiprocessing's own."""

    def __init__(self, pid):
        self._fd = os.pidfd_open(pid)

    def is_alive(self):
        return not select.select([self._fd], [], [], 0)[0]

    def join(self):
        select.select([self._fd], [], [])

    def close(self):
        os.close(self._fd)


class RayWorker(Worker):
    """An actor that is driven like the processes of the suite."""

    def __init__(self, ray, actor):
        self._ray = ray
        self.actor = actor
        self.busy = False
        self.process = None
        self._answer = actor.__ray_call__.remote(lambda _: os.getpid())

    def wait(self):
        """Until it has started."""
        if self.process is None:
            self.pid = self._ray.get(self._answer, timeout=PATIENCE)
            self.process = Process(self.pid)

    def start(self, function, *args, **kwargs):
        self.busy = True
        self._answer = self.actor.call.options(concurrency_group="calls").remote(function, args, kwargs)

    def result(self):
        try:
            ok, value, trace = self._ray.get(self._answer, timeout=PATIENCE)
        except self._ray.exceptions.RayActorError:
            self.process.join()
            raise Gone(-9) from None
        self.busy = False
        if not ok:
            raise value from RemoteTraceback(trace)
        return value

    def done(self):
        return bool(self._ray.wait([self._answer], timeout=0)[0])

    def kill(self):
        os.kill(self.pid, 9)
        self.process.join()

    def end(self):
        self.resume()
        self._ray.kill(self.actor)
        self.process.join()
        self.process.close()


class RayCrew:
    """A separate Ray, and actors that one test after the other uses: one takes seconds to start."""

    def __init__(self):
        self._ray = ray = pytest.importorskip("ray", reason="this entry needs Ray, which shmsync[ray] brings")
        from support.remote import ray_parts  # needs Ray

        self._cluster = contextlib.ExitStack()
        self._cluster.enter_context(ray_parts.one_node())
        self._class = ray.remote(num_cpus=0, max_concurrency=4, concurrency_groups={"calls": 1})(remote_peers.Actor)
        self._idle = [self._start() for _ in range(4)]

    def _start(self):
        return RayWorker(self._ray, self._class.remote())

    def take(self):
        worker = self._idle.pop(0)
        worker.wait()
        return worker

    def give_back(self, worker):
        if not can_go_on(worker, remote_peers.leave):
            worker.end()
            worker = self._start()
        self._idle.append(worker)

    def close(self):
        self._cluster.close()
        for worker in self._idle:
            if worker.process is not None:
                worker.process.close()


class RayFleet(RemoteFleet):
    """Actors with a method update_policy_weights_()."""

    called = True
    roster = "remote_collectors"

    def __init__(self, entry, crew, count=3):
        super().__init__(entry, crew)
        for index in range(count):
            self.workers.append(self._take(index))
        self.actors = [worker.actor for worker in self.workers]

    def _take(self, index):
        worker = self.crew.take()
        worker.call(remote_peers.begin, index)
        return worker

    def replace(self, index):
        self.crew.give_back(self.workers[index])
        self.workers[index] = self._take(index)
        self.actors[index] = self.workers[index].actor

    def init_sender(self, scheme, model_id="policy", **kwargs):
        self.schemes.append(scheme)
        scheme.init_on_sender(model_id, **{self.roster: self.actors, **kwargs})

    def close(self):
        for worker in self.workers:
            self.crew.give_back(worker)
        super().close()


class RayModuleFleet(RayFleet):
    """Actors with a method _update_weights_tensordict()."""

    roster = "actors"

    def register(self, sender, index):
        sender.register_worker(index, self.actors[index])
