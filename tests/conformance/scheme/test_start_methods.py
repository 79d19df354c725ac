"""The way people write it: pipes and processes first, then the scheme. For every start method."""

import multiprocessing
import os
import signal
import time

import pytest

from shmsync.errors import WorkerDied, WriterDied
from shmsync.schemes import MultiProcessWeightSyncScheme
from support.conformance.nets import Stamped, ask
from support.conformance.table import MP, SHM


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


class Trainer:
    """Two workers with their pipes. All pipes are made before any process starts, so a fork inherits all their ends."""

    def __init__(self, method, scheme, *args):
        context = multiprocessing.get_context(method)
        both = [context.Pipe() for _ in range(2)]
        self.notes, theirs = context.Pipe(duplex=False)
        self.pipes = [ours for ours, _ in both]
        self.procs = [
            context.Process(target=worker_loop, args=(index, scheme, pipe, theirs, *args), daemon=True)
            for index, (_, pipe) in enumerate(both)
        ]
        for process in self.procs:
            process.start()
        for _, pipe in both:
            pipe.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process, pipe in zip(self.procs, self.pipes, strict=True):
            if error[0] is None and process.is_alive():
                pipe.send("stop")
            else:
                process.kill()
            process.join()
            pipe.close()
        self.notes.close()

    def told(self, count=2):
        """What the workers have told, sorted."""
        return sorted(self.notes.recv() for _ in range(count))


@pytest.mark.parametrize(
    ("method", "entry"),
    [("forkserver", MP), ("fork", SHM), pytest.param("spawn", SHM, marks=pytest.mark.slow)],
    ids=lambda value: getattr(value, "name", value),
)
def test_pipes_and_scheme_go_into_process_arguments_and_a_death_is_seen(method, entry):
    scheme = entry.make()
    with Trainer(method, scheme) as trainer:
        scheme.init_on_sender("policy", pipes=trainer.pipes)  # no Process objects: who answers is known from then on
        sender = scheme.get_sender()
        first = sender.send(Stamped(1), timeout=60)
        assert first == 1
        assert trainer.told() == [(0, 1), (1, 1)]
        trainer.procs[1].kill()
        since = time.monotonic()
        with pytest.raises(WorkerDied, match="worker 1") as died:
            sender.send(Stamped(2), timeout=60)
        assert time.monotonic() - since < 30
        assert died.value.missing == [1]
        assert trainer.told(1) == [(0, 2)]
        assert sender.send(Stamped(3), timeout=60) == first + 2
        assert trainer.told(1) == [(0, 3)]
    assert [process.exitcode for process in trainer.procs] == [0, -9]
    scheme.shutdown()


def test_forked_worker_learns_that_the_trainer_was_killed():
    """Its siblings hold the trainer's end of its pipe, so the pipe itself never tells."""
    ours, theirs = os.pipe()
    context = multiprocessing.get_context("fork")
    trainer = context.Process(target=trainer_with_workers, args=(theirs,))
    trainer.start()
    os.close(theirs)
    with os.fdopen(ours, "rb") as told:
        assert told.read(2) == b"11"  # each worker has version 1
        trainer.kill()
        trainer.join()
        assert told.read() == b"WW"  # WriterDied in each of them
