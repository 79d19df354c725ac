"""A trainer, which is the test itself, and its workers."""

from __future__ import annotations

import contextlib
from multiprocessing import reduction, resource_sharer

from support.conformance import peers
from support.conformance.nets import Stamped
from support.worker import Worker


class Crew:
    """Workers of one start method, used by one test after the other: some methods take seconds to start one."""

    def __init__(self, context):
        self.context = context
        self._idle = [self._start() for _ in range(3)]

    def _start(self):
        return Worker(self.context, peers.receive_until_called)

    def take(self):
        return self._idle.pop(0) if self._idle else self._start()

    def give_back(self, worker):
        """After a test, whatever state it is in: for the next test, once it has forgotten everything."""
        if worker.process.is_alive():
            worker.resume()
            if not worker.busy:
                with contextlib.suppress(Exception):
                    worker.call(peers.leave)
                    self._idle.append(worker)
                    return
        worker.end()
        if len(self._idle) < 3:
            self._idle.append(self._start())  # its imports run beside the tests that come first

    def close(self):
        for worker in self._idle:
            worker.end()


class Fleet:
    """Three workers at the other ends of pipes. Each receives between the calls of the test, until hold()."""

    def __init__(self, entry, crew):
        self.entry = entry
        self.crew = crew
        self.workers = []
        self.schemes = []
        self.pipes = []
        for index in range(3):
            self.workers.append(crew.take())
            self.pipes.append(self._connect(self.workers[-1], index))

    def make(self, **options):
        return self.entry.make(**options)

    def open(self, model_id="policy", model=Stamped, *args, scheme=None, given=(), **options):
        """Synchronise a model `model(*args)` of every worker; its sender. `given`: what init_on_sender() gets too."""
        scheme = self.make(**options) if scheme is None else scheme
        self.init_sender(scheme, model_id, **dict(given))
        for index in range(len(self.workers)):
            self.join(index, scheme, model_id, model, *args)
        return scheme.get_sender()

    def join(self, index, scheme, model_id="policy", model=Stamped, *args):
        self.workers[index].call(peers.join, scheme, model_id, model, *args)

    def hold(self, *indices):
        """From now on these receive only when they are told to; without indices, all."""
        for index in indices or range(len(self.workers)):
            self.workers[index].call(peers.hold)

    def release(self, *indices):
        for index in indices or range(len(self.workers)):
            self.workers[index].call(peers.hold, False)

    def stamps(self, model_id="policy", workers=None):
        """The number that each worker's model is filled with; a pair, if not all of it is."""
        workers = self.workers if workers is None else [self.workers[index] for index in workers]
        return [worker.call(peers.look, model_id) for worker in workers]

    def versions(self, model_id="policy"):
        return [worker.call(peers.version, model_id) for worker in self.workers]

    def replace(self, index):
        """A new worker, with a new pipe, in the place of a dead one."""
        self.crew.give_back(self.workers[index])
        self.pipes[index].close()
        self.workers[index] = self.crew.take()
        self.pipes[index] = self._connect(self.workers[index], index)

    def _connect(self, worker, index):
        ours, theirs = self.crew.context.Pipe()
        worker.start(peers.take_pipe, index)
        reduction.send_handle(worker.conn, theirs.fileno(), worker.pid)
        worker.result()
        theirs.close()
        return ours

    def init_sender(self, scheme, model_id="policy", **kwargs):
        self.schemes.append(scheme)
        given = {"pipes": self.pipes, "procs": [worker.process for worker in self.workers]}
        scheme.init_on_sender(model_id, **{**given, **kwargs})

    def register(self, sender, index):
        sender.register_worker(index, self.pipes[index], self.workers[index].process)

    def close(self):
        for worker in self.workers:
            self.crew.give_back(worker)
        for scheme in self.schemes:
            scheme.shutdown()
        for pipe in self.pipes:
            pipe.close()
        resource_sharer.stop()  # the thread that gave away plain shared tensors
