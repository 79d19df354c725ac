"""A sender and its receivers in one process, for each kind of sender and receiver that there is."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import pickle
import time
from collections import deque

from shmsync.engine.outcome import Failure
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme
from shmsync.schemes.remote.base import Failed, RemoteScheme, RemoteTransport
from support.conformance.nets import Stamped, ask


class Box:
    """A transport with the two methods that one needs."""

    def __init__(self):
        self.letters = deque()

    def send_weights(self, model_id, weights):
        self.letters.append((model_id, weights))

    def receive_weights(self, timeout=1.0):
        return self.letters.popleft() if self.letters else None


class BoxScheme(WeightSyncScheme):
    """A scheme of the user's own."""

    def create_transport(self, pipe_or_context):
        return pipe_or_context


class Address:
    """A worker that is called: its receiver."""

    def __init__(self, receiver):
        self.receiver = receiver
        self.silent = False  # it takes calls, and answers none


class Calling:
    """A call that is carried out at once, and answered as soon as the worker is not silent any more."""

    def __init__(self, address, weights):
        self._address, self._failure = address, None
        try:
            address.receiver.apply_weights(weights)
        except Exception as error:
            self._failure = Failure.of(error)

    def done(self):
        return not self._address.silent

    def result(self):
        if self._failure is not None:
            raise Failed(self._failure)


class CallTransport(RemoteTransport):
    def __init__(self, address, timeout):
        super().__init__(timeout)
        self.address = address

    connected = property(lambda self: self.address is not None)

    def wrap(self, packed):
        return pickle.dumps(packed)

    def start(self, content):
        return Calling(self.address, pickle.loads(content))

    @staticmethod
    def wait(requests, seconds):
        if not any(request.done() for request in requests):
            time.sleep(min(seconds, 0.001))

    def check_connection(self):
        return True


class CallScheme(RemoteScheme):
    """A scheme for several machines, whose workers are called in this process."""

    def create_transport(self, pipe_or_context):
        return CallTransport(pipe_or_context, self.timeout)

    def workers(self, arguments):
        return arguments.needed("actors")


def derived(scheme, which, hooks):
    """Let this scheme make senders or receivers of a class that overrides these methods."""
    made = getattr(scheme, f"create_{which}")()
    kind = type("Derived", (type(made),), hooks)
    setattr(scheme, f"create_{which}", lambda: kind(scheme))


class Rig:
    """Two workers of a kind, beside their trainer.

    Args:
        make: the scheme's class.
        nets: the workers' models.
        sender, receiver: methods that a sender or receiver of the user's own overrides.
        prepares: the prepare_weights() of a scheme of the user's own.
        context, given: what init_on_sender() gets.
        options: of the scheme.
    """

    def __init__(
        self, make, *, nets=None, sender=None, receiver=None, prepares=None, context=None, given=None, **options
    ):
        if prepares:
            make = type("Preparing", (make,), {"prepare_weights": prepares})
        self.make_scheme = functools.partial(make, **options)
        self.nets = [Stamped(0), Stamped(0)] if nets is None else nets
        self.pipes = []
        self.scheme = self.make_scheme()
        self.workers = [self.make_scheme() for _ in self.nets]
        if sender:
            derived(self.scheme, "sender", sender)
        for index, worker in enumerate(self.workers):
            if receiver:
                derived(worker, "receiver", receiver)
            worker.init_on_worker("policy", model=self.nets[index], worker_idx=index, **self.connect())
        self.scheme.init_on_sender("policy", context, **self.addresses(), **(given or {}))
        self.sender = self.scheme.get_sender()
        self.receivers = [worker.get_receiver() for worker in self.workers]

    def deliver(self, weights=None, worker_ids=None):
        """Send, let every worker receive, and wait; the version."""
        self.sender.send_async(weights, worker_ids)
        self.receive()
        return self.sender.wait_async(timeout=60)

    def receive(self, workers=None):
        for receiver in self.receivers if workers is None else [self.receivers[index] for index in workers]:
            receiver.receive(timeout=0.05)

    def receive_until(self, call, workers=None):
        """Let these workers receive, by default all, until this Call has returned; what it returned."""
        while call.is_alive():
            self.receive(workers)
            call.join(0.01)
        return call.result()

    def stamps(self):
        return [ask(net) for net in self.nets]

    def close(self):
        for scheme in (self.scheme, *self.workers):
            scheme.shutdown()


class BoxRig(Rig):
    def connect(self):
        self.pipes.append(Box())
        return {"pipe": self.pipes[-1]}

    def addresses(self):
        return {"pipes": self.pipes}


class PipeRig(Rig):
    def connect(self):
        ours, theirs = multiprocessing.Pipe()
        self.pipes += [ours, theirs]
        return {"pipe": theirs}

    def addresses(self):
        return {"pipes": self.pipes[::2]}

    def join(self, net):
        """One more worker, which the sender knows."""
        worker = self.make_scheme()
        worker.init_on_worker("policy", model=net, **self.connect())
        self.sender.register_worker(len(self.workers), self.pipes[-2])
        self.workers.append(worker)
        self.receivers.append(worker.get_receiver())
        return net

    def close(self):
        super().close()
        for pipe in self.pipes:
            pipe.close()


class CallRig(Rig):
    """A scheme for several machines."""

    def connect(self):
        return {}

    def addresses(self):
        self.pipes = [Address(worker.get_receiver()) for worker in self.workers]
        return {"actors": self.pipes}

    def receive(self, workers=None):
        """Weights are applied as they come."""


KINDS = {
    "own": (BoxRig, BoxScheme),
    "mp": (PipeRig, MultiProcessWeightSyncScheme),
    "shm": (PipeRig, SharedMemWeightSyncScheme),
    "call": (CallRig, CallScheme),
}
OPTIONS = {"shm": {"groups": [[0], [1]]}}


@contextlib.contextmanager
def rigs(kind, options=None):
    """make(...) -> a Rig of this kind, closed at the end. `options`: of its scheme, by default those of OPTIONS."""
    made = []
    rig, scheme = KINDS[kind]
    always = OPTIONS.get(kind, {}) if options is None else options

    def make(**more):
        made.append(rig(scheme, **{**always, **more}))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.close()
