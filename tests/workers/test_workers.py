"""Workers: processes that are attached when the `with` is entered, and gone when it is left."""

from __future__ import annotations

import logging
import math
import multiprocessing
import signal
import threading
import time

import pytest
import torch

import shmsync
from support.calls import Call
from support.jobs import workers as jobs
from support.jobs.workers import never_returns, pids, queue
from support.processes import alive, kill, stop, until, until_waits
from support.weights import stamped, stamps


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


def wait_for_good(sub, answers=None):
    """A worker that waits without versions()."""
    try:
        sub.wait_version(10**6)
    except shmsync.ClosedError as error:
        if answers is not None:
            answers.put(str(error))
        raise


def deaf(sub, ready):
    """Ends by SIGKILL only."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    while True:
        time.sleep(3600)


def attach_more(sub):
    """Two more subscribers of the same process, and then nothing: the trainer terminates it."""
    others = [shmsync.Subscriber(sub.name), shmsync.Subscriber(sub.name, worker=7)]
    never_returns(others)


@pytest.mark.parametrize("method", ["forkserver", "fork"])  # spawn: test_programs.py
def test_workers_are_attached_on_entry_apply_each_version_and_end_on_leaving(method):
    answers = queue(method)
    with (
        shmsync.Publisher(stamped(1), slots=2, timeout=120.0) as pub,
        shmsync.Workers(pub, report_versions, 2, args=(answers,), start_method=method, threads=3) as workers,
    ):
        assert sorted(reader.worker for reader in pub.readers()) == workers.alive == [0, 1]
        ended = pids(workers)
        assert len(set(ended)) == 2
        for version in range(2, 5):
            assert pub.publish(stamped(version), wait=True) == version
    assert not any(map(alive, ended))
    seen = {0: [], 1: []}
    while not answers.empty():
        worker, *found = answers.get()
        seen[worker].append(found)
    for found in seen.values():
        assert found[-1] == ["left", 3]
        versions = [version for version, *_ in found[:-1]]
        # A worker may still be in its start when it acks the first one or two; from then on it misses none.
        assert versions in ([1, 2, 3, 4], [2, 3, 4], [3, 4])
        assert all(version == low == high for version, low, high in found[:-1])
    assert workers.procs == workers.alive == []


def test_workers_end_while_the_publisher_goes_on_and_others_may_follow(pub):
    for _ in range(2):
        with shmsync.Workers(pub, jobs.apply, 2) as workers:
            pub.publish(wait=True)
            with pytest.raises(shmsync.ProtocolError, match="has Workers already"), shmsync.Workers(pub, jobs.apply, 1):
                pass
            assert workers.alive == [0, 1]
        assert pub.readers() == []
    assert pub.publish(wait=True) == 4


def test_a_version_that_was_published_before_leaving_is_applied_and_is_the_last(pub):
    """A worker that is busy when the trainer leaves still gets the version that was published meanwhile."""
    answers, begun, go_on = queue(), *(multiprocessing.get_context("forkserver").Event() for _ in range(2))
    with shmsync.Workers(pub, report_slowly, 1, args=(answers, begun, go_on), timeout=120.0) as workers:
        begun.wait()
        pub.publish(stamped(2), wait=False)
        threading.Timer(0.2, go_on.set).start()
        assert workers.alive == [0]
    found = []
    while not answers.empty():
        found.append(answers.get())
    assert found == [1, 2, "left"]


def test_leaving_ends_a_wait_for_a_version(pub):
    answers = queue()
    with shmsync.Workers(pub, wait_for_good, 1, args=(answers,)):
        pass
    assert "has left the Workers" in answers.get()


def test_closing_the_publisher_first_ends_them_too():
    with shmsync.Publisher(stamped(1), timeout=120.0) as pub, shmsync.Workers(pub, jobs.apply, 1) as workers:
        (process,) = workers.procs
        pub.close()
        process.join()
        assert process.exitcode == 0


def test_a_worker_may_return_early(pub):
    answers = queue()
    with shmsync.Workers(pub, jobs.return_at_once, 2, args=(answers,)) as workers:
        assert sorted(answers.get() for _ in range(2)) == [0, 1]
        until(lambda: workers.alive == [])
        assert pub.publish(wait=True) == 2


def return_when_asked(sub, go_on):
    if sub.worker == 0:
        go_on.wait()
    else:
        jobs.apply(sub)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_wait_for_a_worker_that_has_returned_ends_at_once(pub, when):
    """There is no deadline here: only the end of its process ends the wait."""
    go_on = multiprocessing.get_context("forkserver").Event()
    with shmsync.Workers(pub, return_when_asked, 2, args=(go_on,)) as workers:
        if when == "before":
            go_on.set()
            until(lambda: workers.alive == [1])
        waiting = Call(pub.publish, wait=[1, 0], timeout=math.inf)
        if when == "meanwhile":
            until_waits(waiting, "_wait_for_acks")
            go_on.set()
        with pytest.raises(
            shmsync.WorkerDied, match=r"worker 0 \(pid \d+, exit code 0\) ended .* workers\.alive lists"
        ) as caught:
            waiting.result()
        assert (caught.value.missing, caught.value.version) == ([0], 2)
        assert pub.publish(wait=workers.alive) == 3


def test_what_does_not_return_is_terminated(pub, caplog):
    ready = multiprocessing.get_context("forkserver").Event()
    for work, args in ((jobs.never_returns, ()), (deaf, (ready,))):
        with caplog.at_level(logging.WARNING, "shmsync"), shmsync.Workers(pub, work, 1, args=args) as workers:
            if args:
                ready.wait()
            (pid,) = pids(workers)
            workers._timeout = 0.2  # the entry had all of its time
        assert not alive(pid)
        assert "worker 0 had not returned in time" in caplog.text, work
        assert "must end when sub.publisher_alive is False" in caplog.text
        assert pub.readers() == []
        pub.publish(stamped(2), wait=True)  # an end on purpose is no death to later waits
        caplog.clear()


def test_a_stopped_worker_is_ended_too(pub):
    with shmsync.Workers(pub, jobs.apply, 2) as workers:
        pid = pids(workers)[0]
        stop(pid)
        workers._timeout = 0.2
    assert not alive(pid) and pub.readers() == []


def test_workers_without_a_with(pub):
    workers = shmsync.Workers(pub, jobs.apply, 2)
    with pytest.raises(ValueError, match="none was started"):
        workers.restart(0)
    assert workers.start() is workers
    pub.publish(stamped(2), wait=True)
    assert sorted((reader.worker, reader.acked) for reader in pub.readers()) == [(0, 2), (1, 2)]
    with pytest.raises(shmsync.ProtocolError, match="has Workers already"):
        workers.start()
    ended, others = pids(workers), shmsync.Workers(pub, jobs.apply, 1)
    others.close()  # never started; it ends none of the others
    kill(ended[1])
    with pytest.raises(shmsync.WorkerDied, match=r"worker 1 died .*SIGKILL"):
        pub.publish(stamped(3), wait=True)
    for _ in range(2):
        workers.close()
        assert workers.procs == [] and not any(map(alive, ended))
    pub.publish(stamped(4), wait=True)  # these workers have ended, and others need not follow
    with workers:
        assert workers.alive == [0, 1]


def test_every_row_of_an_ended_worker_is_freed_and_no_other(pub):
    with shmsync.Workers(pub, attach_more, 1) as workers, shmsync.Subscriber(pub.handle, worker=5):
        until(lambda: sorted(reader.worker or 0 for reader in pub.readers()) == [0, 0, 5, 7])
        workers._timeout = 0.1
    assert [reader.worker for reader in pub.readers()] == []  # the Subscriber above has closed its own row
    pub.publish(stamped(2), wait=True)
