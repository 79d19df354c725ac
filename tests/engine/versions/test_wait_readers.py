"""wait_readers(): until these workers are attached, or one of them died before it could."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from math import inf as for_ever

import pytest
import torch

import shmsync
from support.jobs.engine import attach, detach
from support.processes import kill, until_waits
from support.weights import stamped


@pytest.fixture
def pub():
    with shmsync.Publisher(stamped(1), slots=2) as made:
        yield made


def test_those_that_are_attached(pub, start):
    workers = start(2)
    for index, worker in enumerate(workers):
        worker.call(attach, pub.handle, worker=index)
    assert pub.wait_readers([0, 1], timeout=0) is None
    pub.wait_readers([], timeout=0)
    pub.wait_readers(range(2), timeout=for_ever, procs=[worker.process for worker in workers])
    pub.wait_readers([1], timeout=for_ever, procs={1: workers[1].process})


def test_it_waits_for_those_that_come(pub, start):
    workers = start(3)
    waiting = threading.Thread(target=pub.wait_readers, args=([0, 1, 2],), kwargs={"timeout": for_ever})
    waiting.start()
    for index, worker in enumerate(workers):
        until_waits(waiting, "wait_for_readers")
        assert waiting.is_alive()
        worker.call(attach, pub.handle, worker=index)
    waiting.join()
    assert sorted(info.worker for info in pub.readers()) == [0, 1, 2]


def test_the_missing_are_named_at_the_deadline(pub, start):
    worker, stopped = start(2)
    worker.call(attach, pub.handle, worker=1)
    stopped.stop()
    with pytest.raises(shmsync.AckTimeout, match="worker 0, worker 2") as error:
        pub.wait_readers([0, 1, 2], timeout=0.1)
    assert (error.value.missing, error.value.version) == ([0, 2], 1)
    with pytest.raises(TimeoutError, match=rf"worker 0 .*stopped: worker 0 \(pid {stopped.pid}\)"):
        pub.wait_readers([0, 1], timeout=0.1, procs=[stopped.process, worker.process])


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])


KINDS = {
    "Process": lambda worker: worker.process,
    "pid": lambda worker: worker.pid,
}


@pytest.mark.parametrize("mapping", [False, True], ids=["list", "mapping"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_worker_killed_before_it_attached(pub, start, kind, when, mapping):
    """There is no deadline here: only the death ends the wait."""
    alive, dying = start(2)
    alive.call(attach, pub.handle, worker=0)
    procs = [KINDS[kind](alive), KINDS[kind](dying)]
    if mapping:
        procs = dict(enumerate(procs))
    errors = []

    def wait():
        try:
            pub.wait_readers([0, 1], timeout=for_ever, procs=procs)
        except shmsync.WorkerDied as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    if when == "before":
        dying.kill()
        wait()
    else:
        waiting.start()
        until_waits(waiting, "wait_for_readers")
        dying.kill()
        waiting.join()
    assert errors[0].missing == [1]
    assert f"pid {dying.pid}" in str(errors[0])
    assert "worker 1" in str(errors[0])


def test_a_killed_popen_is_named_with_its_signal(pub):
    process = sleeper()
    errors = []

    def wait():
        try:
            pub.wait_readers([4], timeout=for_ever, procs=[process])
        except shmsync.WorkerDied as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until_waits(waiting, "wait_for_readers")
    kill(process.pid)
    waiting.join()
    assert errors[0].missing == [4]
    assert "SIGKILL" in str(errors[0])
    process.wait()


def test_the_death_of_the_late_and_of_the_attached(pub, start):
    """A worker that attached and died is not attached: its death is reported as well."""
    worker, late = start(2)
    worker.call(attach, pub.handle, worker=0)
    worker.kill()
    with pytest.raises(shmsync.WorkerDied, match="worker 0") as error:
        pub.wait_readers([0, 1], timeout=for_ever, procs=[worker.process, late.process])
    assert error.value.missing == [0]
    with pytest.raises(shmsync.AckTimeout) as error:  # nobody told which process it is: its successor may come
        pub.wait_readers([0], timeout=0.1)
    assert error.value.missing == [0]
    heir = start()
    heir.call(attach, pub.handle, worker=0)
    pub.wait_readers([0], timeout=for_ever)
    heir.call(detach)
    with pytest.raises(shmsync.AckTimeout):
        pub.wait_readers([0], timeout=0)


def test_close_ends_the_wait(pub):
    errors = []

    def wait():
        try:
            pub.wait_readers([0], timeout=for_ever)
        except shmsync.ClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until_waits(waiting, "wait_for_readers")
    pub.publish()  # the wait holds no lock
    pub.close()
    waiting.join()
    assert len(errors) == 1


def test_bad_arguments(pub):
    process = multiprocessing.Process(target=print)
    for workers, procs, error in [
        (3, None, TypeError),
        ("01", None, TypeError),
        ([True], None, ValueError),
        ([-1], None, ValueError),
        ([0, 1], [os.getpid()], ValueError),
        ([0], {1: os.getpid()}, ValueError),
        ([0], [object()], TypeError),
        ([0], [True], TypeError),
        ([0], os.getpid(), TypeError),
        ([0], [process], ValueError),
    ]:
        with pytest.raises(error):
            pub.wait_readers(workers, timeout=0, procs=procs)
    with pytest.raises(ValueError, match="timeout"):
        pub.wait_readers([0], timeout="1")


def test_it_leaves_no_descriptor(pub):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(shmsync.AckTimeout):
            pub.wait_readers([0], timeout=0, procs=[os.getpid()])
    assert len(os.listdir("/proc/self/fd")) == before
    assert torch.equal(pub.weights["scalar"], torch.tensor(1))
