"""What workers of Workers run in tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import torch

import shmsync
from support.weights import stamps


def report_versions(sub, answers):
    for version in sub.versions():
        # No section: it would move to the next version, which the trainer may have published since this one was acked.
        # With two slots this version's is written again for the one after that, and that waits for this worker.
        answers.put((sub.worker, version, *stamps(sub.weights)))
    answers.put((sub.worker, "left", torch.get_num_threads()))


def report_slowly(sub, answers, begun, go_on):
    for version in sub.versions():
        answers.put(version)
        begun.set()
        go_on.wait()
    answers.put("left")


def apply(sub):
    for _ in sub.versions():
        pass


def ignore(sub, _):
    apply(sub)


def wait_for_good(sub, answers=None):
    """A worker that waits without versions()."""
    try:
        sub.wait_version(10**6)
    except shmsync.ClosedError as error:
        if answers is not None:
            answers.put(str(error))
        raise


def never_returns(sub):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        time.sleep(3600)


def deaf(sub, ready):
    """Ends by SIGKILL only."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
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


def fail_at_once(sub):
    raise ZeroDivisionError("before the first version")


def fail_without(sub, flag):
    if not os.path.exists(flag):
        raise ValueError("no flag")
    apply(sub)


def attach_more(sub):
    """Two more subscribers of the same process, and then nothing: the trainer terminates it."""
    others = [shmsync.Subscriber(sub.name), shmsync.Subscriber(sub.name, worker=7)]
    never_returns(others)


def return_at_once(sub, answers):
    answers.put(sub.worker)


def die_at(sub, version, number=signal.SIGKILL, once=None):
    """Die at this version; with `once`, an Event, only worker 0 and only the first time."""
    for each in sub.versions():
        if each >= version and (once is None or (sub.worker == 0 and not once.is_set())):
            if once is not None:
                once.set()
            os.kill(os.getpid(), number)


def exit_with(sub, code):
    sys.exit(code)


def draw(sub, answers):
    answers.put((sub.worker, torch.rand(1).item(), random.random()))
    apply(sub)


def has_children(sub, answers):
    with contextlib.suppress(shmsync.ClosedError):
        answers.put(subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout.strip())
    apply(sub)


def forward(sub, answers):
    policy = sub.bind(torch.nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        for version in sub.versions():
            answers.put((version, policy(torch.ones(1, 4)).item()))


def put_or_fail(sub, answers):
    for version in sub.versions():
        if version == 1:
            answers.put((sub.worker, version))
        elif sub.worker == 0:
            raise ValueError("the environment broke")
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def no_device():
    raise OSError("no such device: /dev/simulator7")


class Unloadable:
    """An argument that fails while a worker unpickles it, or calls another function there."""

    def __init__(self, call=no_device, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args
