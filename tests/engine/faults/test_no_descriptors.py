"""A process without a free descriptor cannot look at others. What it cannot find out is not their death."""

import contextlib
import io
import os
import resource

import pytest

import shmsync
from shmsync import cli
from support.jobs.engine import (
    attach,
    begin_update,
    detach,
    enter,
    leave,
    look,
    open_arena,
    publish,
)
from support.processes import descriptors
from support.weights import stamped

FREE = (0, 2, 5)  # from none to more than any call needs: each call gets further than the one before
OWN_CALLS = pytest.mark.no_cuda(reason="CUDA's own calls to the system fail too, and the error is CUDA's")


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


@pytest.mark.parametrize("slots", [1, 2])
def test_publisher_leaves_a_living_readers_pin_alone(start, slots):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena, 1, slots=slots), worker=5)
    worker.call(enter)
    for version in range(2, slots + 1):
        trainer.call(publish, version)
    kind, text = trainer.call(poor, 0, publish, slots + 1, timeout=0.2)
    assert kind == "ReaderStalled"
    assert "worker 5" in text
    assert worker.call(leave) is False
    kind, text = trainer.call(poor, 0, publish, slots + 1, wait=[5], timeout=0.2)
    assert kind == "AckTimeout"  # and not that it died
    assert worker.call(look) == (slots + 1,) * 3


def test_reader_stays_out_while_a_living_writer_writes(start):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena))
    trainer.call(begin_update, 2)
    kind, _ = worker.call(poor, 0, look, timeout=0.2)
    assert kind == "WriterBusy"
