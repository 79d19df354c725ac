"""What workers of Workers run in tests, and how a test sees them."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time

import torch


def queue(method="forkserver"):
    return multiprocessing.get_context(method).SimpleQueue()


def pids(workers):
    return [process.pid for process in workers.procs]


# ---- in a worker


def apply(sub):
    for _ in sub.versions():
        pass


def ignore(sub, _):
    apply(sub)


def never_returns(sub):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        time.sleep(3600)


class Odd(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, one, two):
        super().__init__(one)


def fail_at(sub, version, kind=ValueError):
    for each in sub.versions():
        if each >= version:
            raise kind("the environment broke") if kind is not Odd else Odd(1, 2)


def return_at_once(sub, answers):
    answers.put(sub.worker)


def draw(sub, answers):
    answers.put((sub.worker, torch.rand(1).item(), random.random()))
    apply(sub)


def forward(sub, answers):
    policy = sub.bind(torch.nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        for version in sub.versions():
            answers.put((version, policy(torch.ones(1, 4)).item()))
