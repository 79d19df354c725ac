"""What a send over shared memory costs in Python: calls, which no load can change, in the trainer and in a worker."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from shmsync.schemes import SharedMemWeightSyncScheme
from shmsync.schemes.arenas.plain_copy import PlainCopy
from shmsync.schemes.link.sender_end import Route
from support.calls import Call, calls_of
from support.faults.interrupts import Interrupt, interrupt_at
from support.processes import PATIENCE, until

NO_HANDLER = ("try:",)  # no handler of a signal runs between the end of the line before it and the next one
SENDS = 12  # the first few make what is kept


def model(layers=3):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def counted(work):
    """How often it calls each function of Python, by their code."""
    return Counter(code for event, code in calls_of(work) if event == "call" and code.co_name != "<genexpr>")


class Worker(threading.Thread):
    """Receives in a separate thread, and counts the calls of each receive() that had news."""

    def __init__(self, pipe, index, layers):
        super().__init__(daemon=True)
        self.counts, self.ready = [], threading.Event()
        self._pipe, self._index, self._layers = pipe, index, layers
        self._over = False

    def run(self):
        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_worker("policy", pipe=self._pipe, worker_idx=self._index, model=model(self._layers))
        receiver = scheme.get_receiver()
        self.ready.set()
        try:
            while not self._over:
                news = []
                found = counted(lambda news=news: news.append(receiver.receive(0.05)))
                if news[0]:
                    self.counts.append(found.total())
        except shmsync.WriterDied:
            pass
        finally:
            scheme.shutdown()

    def end(self):
        self._over = True
        self.join(30)
        assert not self.is_alive()


@pytest.fixture
def sending():
    """sending(workers, ...) -> a sender, its threads and the trainer's module."""
    made = []

    def start(workers, layers=3, **options):
        pipes = [multiprocessing.Pipe() for _ in range(workers)]
        threads = [Worker(theirs, index, layers) for index, (_, theirs) in enumerate(pipes)]
        scheme, module = SharedMemWeightSyncScheme(**options), model(layers)
        made.append((scheme, threads, pipes))
        for thread in threads:
            thread.start()
            assert thread.ready.wait(30)
        scheme.init_on_sender("policy", pipes=[mine for mine, _ in pipes], model=module)
        return scheme.get_sender(), threads, module

    yield start
    for scheme, threads, pipes in made:
        for thread in threads:
            thread.end()
        scheme.shutdown()
        for mine, theirs in pipes:
            mine.close()
            theirs.close()


def sent(sender, module):
    return counted(lambda: sender.send(module))


FORMS = {
    "module": lambda module: module,
    "tensordict": lambda module: TensorDict.from_module(module).data,
    "state_dict": lambda module: module.state_dict(),
}


# By the form of the weights and the number of workers; what is no module is found by what it is like. One parameter,
# not a cross product: `make test` takes all of these.
MOST = {
    ("module", 1): 55,
    ("module", 4): 85,
    ("tensordict", 1): 95,
    ("tensordict", 4): 140,
    ("state_dict", 1): 95,
    ("state_dict", 4): 140,
}


@pytest.mark.parametrize("case", MOST, ids=lambda case: f"{case[0]}-{case[1]}")
def test_the_trainer_calls_few_functions(sending, case):
    form, workers = case
    sender, _, module = sending(workers)
    weights = FORMS[form](module)
    counts = [sent(sender, weights).total() for _ in range(SENDS)]
    assert min(counts) <= MOST[case]


def test_a_worker_calls_few_functions(sending):
    sender, (worker,), module = sending(1)
    for number in range(SENDS):
        sender.send(module)
        until(lambda number=number: len(worker.counts) > number)  # else one receive() may take two messages
    assert min(worker.counts) <= 50


def test_a_tensor_takes_no_call_at_either_end(sending):
    least = []
    for layers in (3, 60):
        sender, (worker,), module = sending(1, layers)
        ours, end = [], time.monotonic() + PATIENCE
        # A message that came in two pieces, or late, takes more; on a busy machine hundreds of one end may.
        while len(ours) < 20 * SENDS or (least and time.monotonic() < end):
            ours.append(sent(sender, module).total())
            if least and (min(ours), min(worker.counts, default=0)) == least[0]:
                break
        least.append((min(ours), min(worker.counts)))
    assert least[0] == least[1]


def test_an_interrupt_at_any_line_of_the_quick_way_leaves_no_lock_taken(sending):
    sender, _, module = sending(3)
    for _ in range(SENDS):
        sender.send(module)
    quick = Route.exchange.__code__
    for line in itertools.count():
        with interrupt_at(line, lambda code: code is quick, NO_HANDLER) as raised, suppress(Interrupt):
            sender.send(module)
        Call(sender.send, module).result()  # in another thread
        if not raised:
            break
    assert line > 10


def test_a_plain_tensordict_that_cannot_be_kept_is_looked_at_once(sending):
    plain = TensorDict.from_module(model()).data.clone().unflatten_keys(".")
    plain["0", "weight"] = torch.zeros(4, 8)[:, ::2]  # has to be written leaf by leaf
    sender, _, module = sending(1, policy_weights={"policy": plain})
    looks = [sent(sender, module)[PlainCopy.of.__func__.__wrapped__.__code__] for _ in range(SENDS)]
    assert looks[-1] == 1
    assert torch.equal(plain["0", "weight"], module[0].weight)
