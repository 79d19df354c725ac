"""A worker that dies is named by the next wait, and started again as often as allowed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

import shmsync
from support.calls import Call
from support.jobs import workers as jobs
from support.jobs.workers import pids
from support.processes import alive, kill, until, until_waits
from support.weights import stamped


def die_at(sub, version, number=signal.SIGKILL, once=None):
    """Die at this version; with `once`, an Event, only worker 0 and only the first time."""
    for each in sub.versions():
        if each >= version and (once is None or (sub.worker == 0 and not once.is_set())):
            if once is not None:
                once.set()
            os.kill(os.getpid(), number)


def die_without_a_row(sub, die, replaced):
    """The first worker 0 gives its row back and dies when asked; worker 1 applies nothing before it was replaced."""
    if sub.worker == 0 and not die.is_set():
        sub.close()
        die.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    if sub.worker == 0:
        replaced.set()
    else:
        replaced.wait()
        time.sleep(0.3)
    jobs.apply(sub)


@pytest.mark.parametrize("wait", [True, [0, 1]])
def test_a_death_names_pid_and_signal(pub, wait):
    with shmsync.Workers(pub, jobs.apply, 2) as workers:
        pid = pids(workers)[1]
        kill(pid)
        with pytest.raises(shmsync.WorkerDied, match=rf"worker 1 died \(pid {pid}, killed by SIGKILL\)") as caught:
            pub.publish(stamped(2), wait=wait)
        assert (caught.value.missing, pub.version) == ([1], caught.value.version)
        assert workers.alive == [0]
        workers.restart(1)
        assert workers.alive == [0, 1]
        assert pids(workers)[1] != pid
        assert pub.publish(stamped(3), wait=[0, 1]) == caught.value.version + 1


def test_each_death_is_raised_once(pub):
    with shmsync.Workers(pub, die_at, 2, args=(2,)):  # they have applied version 2, so a later wait finds it
        dead = []
        while len(dead) < 2:  # one error may name both
            with pytest.raises(shmsync.WorkerDied, match="killed by SIGKILL") as caught:
                while True:
                    pub.publish(wait=True)
            dead += caught.value.missing
        assert sorted(dead) == [0, 1]
        pub.publish(wait=True)


def test_dead_workers_are_started_again_as_often_as_allowed(pub):
    with shmsync.Workers(pub, jobs.apply, 2, restart=2) as workers:
        for version in (2, 3):
            kill(pids(workers)[0])
            assert pub.publish(stamped(version), wait=[0, 1]) == version
            assert workers.alive == [0, 1]
        kill(pids(workers)[0])
        with pytest.raises(shmsync.WorkerDied):
            pub.publish(stamped(4), wait=[0, 1])
        assert workers.alive == [1]


def test_a_wait_starts_a_dead_worker_again(pub):
    once = multiprocessing.get_context("forkserver").Event()
    with shmsync.Workers(pub, die_at, 2, args=(2, signal.SIGKILL, once), restart=1) as workers:
        pub.publish(stamped(2))
        until(lambda: workers.alive == [1])
        with pub.update(wait=[0, 1]) as weights:
            weights["large"].fill_(3)
        assert workers.alive == [0, 1]


def test_a_wait_that_starts_a_worker_again_goes_on_for_the_others(pub):
    context = multiprocessing.get_context("forkserver")
    die, replaced = context.Event(), context.Event()
    with shmsync.Workers(pub, die_without_a_row, 2, args=(die, replaced), restart=1):
        waiting = Call(pub.publish, stamped(2), wait=[0, 1])
        until_waits(waiting, "_wait_for_acks")
        die.set()
        assert waiting.result() == 2
        assert {reader.worker: reader.acked for reader in pub.readers()}[1] == 2


def test_restart_replaces_a_living_worker(pub):
    with shmsync.Workers(pub, jobs.apply, 2) as workers:
        before = pids(workers)
        workers.restart(0)
        assert not alive(before[0])
        assert pids(workers)[1] == before[1]
        pub.publish(wait=[0, 1])
        with pytest.raises(ValueError, match=r"no worker 2, the workers are \[0, 1\]"):
            workers.restart(2)
