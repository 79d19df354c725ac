"""A process that runs another program keeps pid and start time, and yet is another: its rows and names are freed."""

import os
import subprocess
from math import inf as for_ever

import pytest

import shmsync
from shmsync.memory.process import Peer, ProcessState, me
from support.calls import Call
from support.jobs.engine import GONE, attach, begin_update, enter, look, open_arena, read
from support.processes import descriptors, until
from support.programs.programs import become_sleep, run_a_child, until_it_sleeps
from support.weights import stamped


def leave_by_exec(worker):
    worker.start(become_sleep)
    until_it_sleeps(worker.pid)


def test_worker_that_execs_inside_a_section_holds_nobody_up(attached):
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        worker = attached(pub, worker=5)
        worker.call(enter)
        leave_by_exec(worker)
        assert [reader.state for reader in pub.readers()] == [ProcessState.DEAD]
        for v in range(2, 6):
            assert pub.publish(stamped(v)) == v
        assert pub.readers() == []
        assert worker.process.is_alive()


def test_worker_that_execs_is_named_by_who_waits_for_its_ack(attached):
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        worker = attached(pub, worker=5)
        call = Call(pub.publish, stamped(2), wait=[5])
        until(lambda: pub.version == 2)
        leave_by_exec(worker)
        with pytest.raises(shmsync.WorkerDied, match="worker 5") as caught:
            call.result()
        assert caught.value.missing == [5]


def test_joiner_takes_over_the_row_of_a_worker_that_execs(start):
    worker, joiner = start(2)
    with shmsync.Publisher(stamped(1), max_readers=1) as pub:
        worker.call(attach, pub.handle, worker=5)
        leave_by_exec(worker)
        assert joiner.call(attach, pub.handle, worker=6) == 1
        assert [reader.worker for reader in pub.readers()] == [6]


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


@pytest.mark.parametrize("slots", [1, 2])
def test_trainer_that_execs_inside_update(open_trainer, slots):
    trainer = open_trainer(2, slots=slots)
    with shmsync.Subscriber(trainer.handle) as sub:
        trainer.call(begin_update, 3)
        leave_by_exec(trainer)
        if slots == 1:
            with pytest.raises(shmsync.Poisoned) as caught:
                read(sub, timeout=for_ever)
            assert caught.value.version == 3
        else:
            assert read(sub) == (2, 2, 2)


def test_no_descriptor_of_an_arena_outlives_exec():
    before = descriptors()
    with shmsync.Publisher(stamped(1)) as pub, shmsync.Subscriber(pub.handle):
        made = {fd for fd, target in descriptors().items() if before.get(fd) != target}
        assert made
        assert not [fd for fd in made if os.get_inheritable(fd)]


def test_starting_a_child_program_changes_nothing(attached):
    with shmsync.Publisher(stamped(1)) as pub:
        before = me().owner
        worker = attached(pub, worker=5)
        owners = pub._writer.arena.control.owners()
        worker.call(run_a_child)
        subprocess.run(["/bin/true"], check=True)
        assert me().owner == before
        assert [reader.state for reader in pub.readers()] == [ProcessState.LIVE]
        assert pub._writer.arena.control.owners() == owners
        assert not Peer(owner=before).dead
