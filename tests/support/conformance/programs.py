"""Whole workers and trainers, as people write them."""

from __future__ import annotations

import multiprocessing
import os
import signal

from shmsync.errors import WriterDied
from shmsync.schemes import MultiProcessWeightSyncScheme
from support.conformance.nets import Stamped, ask


def worker_loop(index, scheme, pipe, notes):
    """A worker as people write it, which tells the stamp of each version that it applies."""
    net = Stamped()
    scheme.init_on_worker("policy", pipe=pipe, model=net, worker_idx=index)
    receiver = scheme.get_receiver()
    while True:
        if receiver.receive(timeout=0.01):
            notes.send((index, ask(net)))
        for message in receiver._transport.pending():
            if message == "stop":
                return
            notes.send((index, float(scheme.policy_weights["policy"]["layer", "weight"].max())))


def trainer_with_workers(out):
    """A trainer that forks two workers, sends to them, and waits to be killed. It leaves no arena behind."""
    scheme = MultiProcessWeightSyncScheme()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=orphan, args=(scheme, pipe, out)) for _, pipe in pipes]
    for worker in workers:
        worker.start()
    scheme.init_on_sender("policy", pipes=[pipe for pipe, _ in pipes])
    scheme.get_sender().send(Stamped(1), timeout=60)
    signal.pause()


def orphan(scheme, pipe, out):
    scheme.init_on_worker("policy", pipe=pipe, model=Stamped())
    try:
        while True:
            if scheme.get_receiver().receive(timeout=0.01):
                os.write(out, b"1")
    except WriterDied:
        os.write(out, b"W")
