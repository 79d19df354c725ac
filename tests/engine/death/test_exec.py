"""A process that runs another program keeps pid and start time, and yet is another: its rows and names are freed."""

import os
from math import inf as for_ever
from pathlib import Path

import pytest

import shmsync
from support.calls import Call
from support.jobs.engine import GONE, attach, look, open_arena, read
from support.processes import descriptors, state, until
from support.weights import stamped


def become_sleep(_):
    """Run another program in this process. It keeps its pid and its start time, and loses all memory."""
    os.execv("/bin/sleep", ["sleep", "100000"])


def leave_by_exec(worker):
    """Return when the kernel shows all of the new program."""
    worker.start(become_sleep)
    comm = Path(f"/proc/{worker.pid}/comm")
    until(lambda: comm.read_text() == "sleep\n" and state(worker.pid) == "S")


def test_trainer_that_execs_is_dead_to_its_readers(start, name):
    trainer, waiter = start(2)
    handle = trainer.call(open_arena, 2, name=name)
    with shmsync.Subscriber(handle) as sub:
        waiter.call(attach, handle)
        call = Call(sub.wait_version, 3, timeout=for_ever)
        leave_by_exec(trainer)
        with pytest.raises(shmsync.WriterDied, match=str(trainer.pid)):
            call.result()
        assert read(sub) == waiter.call(look) == (2, 2, 2)
        with pytest.raises(GONE):
            shmsync.Subscriber(name)
        with shmsync.Publisher(stamped(7), name=name), shmsync.Subscriber(name) as fresh:
            assert read(fresh) == (3, 7, 7)


def test_no_descriptor_of_an_arena_outlives_exec():
    before = descriptors()
    with shmsync.Publisher(stamped(1)) as pub, shmsync.Subscriber(pub.handle):
        made = {fd for fd, target in descriptors().items() if before.get(fd) != target}
        assert made
        assert not [fd for fd in made if os.get_inheritable(fd)]
