"""A process that has no free descriptor left, or a few."""

from __future__ import annotations

import contextlib
import io
import os
import resource

import shmsync
from shmsync import cli
from support.jobs.engine import attach, detach, look
from support.processes import descriptors
from support.weights import stamped


def exhaust(state, free=0):
    """Use up all descriptors but so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state.limit, state.taken = (soft, hard), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    with contextlib.suppress(OSError):
        while True:
            state.taken.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(free):
        os.close(state.taken.pop())


def replenish(state):
    """Give them back."""
    for fd in state.taken:
        os.close(fd)
    state.taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, state.limit)


def poor(state, free, function, *args, **kwargs):
    """function(state, ...) with so many free descriptors; its result, or the error's type and text."""
    exhaust(state, free)
    try:
        result = function(state, *args, **kwargs)
    except Exception as error:
        result = type(error).__name__, str(error)
    finally:
        replenish(state)
    return result


def open_descriptors(_):
    return descriptors()


# ---- calls that such a process makes


def run_command(state, command):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = cli.main([command])
    return status, out.getvalue()


def open_and_close(state, **kwargs):
    shmsync.Publisher(stamped(1), **kwargs).close()
    return "closed"


def attach_and_detach(state, handle):
    attach(state, handle)
    found = look(state)
    detach(state)
    return found
