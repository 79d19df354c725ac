"""Calls of both ends of a scheme."""

from __future__ import annotations

import contextlib
import multiprocessing

import torch

import shmsync
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.faults.faults import Scenario, need
from support.weights import Net
from support.worker import nothing


def serve_scheme(state, scheme, pipe):
    """Receive until the next call comes."""
    state.model = Net(1)
    scheme.init_on_worker("policy", pipe=pipe, model=state.model)
    receiver = scheme.get_receiver()
    while not state.conn.poll():
        receiver.receive(0.01)
    scheme.shutdown()
    return [parameter.detach().cpu().clone() for parameter in state.model.parameters()]


class Send(Scenario):
    scheme = MultiProcessWeightSyncScheme
    allowed = (shmsync.NoSpace, shmsync.AckTimeout)

    def __init__(self, start):
        self.worker = start()
        self.net = Net(0)

    def prepare(self):
        self.ours, theirs = multiprocessing.Pipe()
        self.worker.begin(serve_scheme, self.scheme(), theirs)
        theirs.close()
        self.sender = None

    def act(self):
        if self.sender is None:
            self.made = self.scheme()
            self.made.init_on_sender("policy", pipes=[self.ours], procs=[self.worker.process], model=self.net)
            self.sender = self.made.get_sender()
        for _ in range(2):
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.add_(0.5)
            self.sender.send(timeout=5)

    def restore(self):
        self.made.shutdown()
        found = self.worker.interrupt(nothing)
        wanted = list(self.net.parameters())
        self.ours.close()
        self.made = self.sender = self.ours = None
        need(all(map(torch.equal, found, wanted)), "the worker has something else")


class SendThroughAnArena(Send):
    scheme = SharedMemWeightSyncScheme


def open_scheme(state, scheme, pipe):
    state.scheme, state.net, state.pipe = scheme, Net(0), pipe
    scheme.init_on_sender("policy", pipes=[pipe], model=state.net)


def send_until_called(state):
    """Send again and again."""
    sender, sent = state.scheme.get_sender(), 0
    while not state.conn.poll():
        with torch.no_grad():
            for parameter in state.net.parameters():
                parameter.add_(0.5)
        # A worker that could not apply it answers with an error, and gets the next version. It lives, so it may not
        # count as dead.
        with contextlib.suppress(shmsync.AckTimeout, shmsync.NoSpace, shmsync.ArenaNotFound):
            sender.send(timeout=0.2)
            sent += 1
    return sent


def shut_scheme(state):
    state.scheme.shutdown()
    state.pipe.close()


class Receive(Scenario):
    scheme = MultiProcessWeightSyncScheme

    def __init__(self, start):
        self.trainer = start()

    def prepare(self):
        self.ours, theirs = multiprocessing.Pipe()
        self.trainer.call(open_scheme, self.scheme(), theirs)
        theirs.close()
        self.trainer.begin(send_until_called)
        self.made, self.receiver, self.model = self.scheme(), None, Net(1)

    def act(self):
        if self.receiver is None:
            self.made.init_on_worker("policy", pipe=self.ours, model=self.model)
            self.receiver = self.made.get_receiver()
        for _ in range(3):
            self.receiver.receive(1.0)

    def check(self, error):
        need(self.receiver is None or not self.ours.closed, "the pipe is closed")
        if error is None:
            before = self.receiver.version
            for _ in range(20):
                if self.receiver.receive(1.0) and self.receiver.version > before:
                    return
            need(False, "nothing arrives any more")

    def restore(self):
        self.trainer.conn.send((shut_scheme, (), {}))
        for _ in range(50):  # the last messages of a sender that shuts down want an answer, too
            if self.trainer.conn.poll(0.01):
                break
            if self.receiver is not None:
                with contextlib.suppress(shmsync.WriterDied):
                    self.receiver.receive(0.01)
        self.trainer.result()
        self.trainer.result()
        self.made.shutdown()
        self.ours.close()
        self.made = self.receiver = self.model = self.ours = None


class ReceiveFromAnArena(Receive):
    scheme = SharedMemWeightSyncScheme
