"""What tests run inside a worker."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import torch


def hold(policy, gate, folder):
    """Its forwards say in that folder that they have begun, and wait until there is a file of the gate's name."""
    policy.gate, policy.folder = gate, folder


def fork_and_join():
    """The exit code of a child that ends as Python programs do."""
    child = multiprocessing.get_context("fork").Process(target=thread_names)
    child.start()
    child.join()
    return child.exitcode


def fork_and_leave():
    """The pid of a child that stays until it is killed."""
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(1)
    return pid


def thread_names():
    return sorted(thread.name for thread in threading.enumerate())


def open_files():
    return len(os.listdir("/proc/self/fd"))


def assign(policy, tag):
    """Give this worker's policy private tensors, all filled with one number."""
    for tensor in (*policy.parameters(), *policy.buffers()):
        tensor.data = torch.full_like(tensor, tag)
