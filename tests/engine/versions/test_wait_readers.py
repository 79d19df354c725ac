"""wait_readers(): until these workers are attached, or one of them died before it could."""

from __future__ import annotations

from math import inf as for_ever

import pytest

import shmsync
from support.calls import Call
from support.jobs.engine import attach, detach
from support.processes import until_waits
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
    waiting = Call(pub.wait_readers, [0, 1, 2], timeout=for_ever)
    for index, worker in enumerate(workers):
        until_waits(waiting, "wait_for_readers")
        assert waiting.is_alive()
        worker.call(attach, pub.handle, worker=index)
    waiting.result()
    assert sorted(info.worker for info in pub.readers()) == [0, 1, 2]


def test_the_missing_are_named_at_the_deadline(pub, start):
    worker, stopped = start(2)
    worker.call(attach, pub.handle, worker=1)
    stopped.stop()
    with pytest.raises(shmsync.AckTimeout, match="worker 0, worker 2") as error:
        pub.wait_readers([0, 1, 2], timeout=0.1)
    assert (error.value.missing, error.value.version) == ([0, 2], 1)
    with pytest.raises(
        TimeoutError, match=rf"worker 0 .*stopped: worker 0 \(pid {stopped.pid}\), `kill -CONT {stopped.pid}`"
    ):
        pub.wait_readers([0, 1], timeout=0.1, procs=[stopped.process, worker.process])


KINDS = {"Process": lambda worker: worker.process, "pid": lambda worker: worker.pid}


@pytest.mark.parametrize(("kind", "when"), [("Process", "before"), ("pid", "meanwhile")])
def test_a_worker_killed_before_it_attached(pub, start, kind, when):
    """There is no deadline here: only the death ends the wait."""
    alive, dying = start(2)
    alive.call(attach, pub.handle, worker=0)
    procs = [KINDS[kind](alive), KINDS[kind](dying)]
    if when == "before":
        dying.kill()
    waiting = Call(pub.wait_readers, [0, 1], timeout=for_ever, procs=procs)
    if when == "meanwhile":
        until_waits(waiting, "wait_for_readers")
        dying.kill()
    with pytest.raises(shmsync.WorkerDied, match="worker 1") as caught:
        waiting.result()
    assert caught.value.missing == [1]
    assert f"pid {dying.pid}" in str(caught.value)


def test_the_death_of_the_late_and_of_the_attached(pub, attached, start):
    """A worker that attached and died is not attached: its death is reported as well."""
    worker, late = start(2)
    worker.call(attach, pub.handle, worker=0)
    worker.kill()
    with pytest.raises(shmsync.WorkerDied, match="worker 0") as error:
        pub.wait_readers([0, 1], timeout=for_ever, procs=[worker.process, late.process])
    assert error.value.missing == [0]
    with pytest.raises(shmsync.AckTimeout) as error:  # its process is unknown: its successor may come
        pub.wait_readers([0], timeout=0.1)
    assert error.value.missing == [0]
    heir = attached(pub, worker=0)
    pub.wait_readers([0], timeout=for_ever)
    heir.call(detach)
    with pytest.raises(shmsync.AckTimeout):
        pub.wait_readers([0], timeout=0)


def test_close_ends_the_wait(pub):
    waiting = Call(pub.wait_readers, [0], timeout=for_ever)
    until_waits(waiting, "wait_for_readers")
    pub.publish()  # the wait holds no lock
    pub.close()
    with pytest.raises(shmsync.ClosedError):
        waiting.result()
