"""An exception of a worker is raised once, in the trainer: by a call that waits, or when the Workers are left."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import sys
import time

import pytest
import torch

import shmsync
from shmsync import cli
from support.calls import Call
from support.jobs import workers as jobs
from support.jobs.workers import apply
from support.processes import until
from support.weights import stamped


def fail_at_once(sub):
    raise ZeroDivisionError("before the first version")


def fail_without(sub, flag):
    if not os.path.exists(flag):
        raise ValueError("no flag")
    apply(sub)


def exit_with(sub, code):
    sys.exit(code)


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


def test_an_exception_is_raised_by_the_next_publish_that_waits():
    with (
        shmsync.Publisher(stamped(1), timeout=120.0) as pub,
        shmsync.Workers(pub, jobs.fail_at, 2, args=(3,)) as workers,
    ):
        pub.publish(stamped(2), wait=True)
        said = r"worker \d \(pid \d+.*ValueError: the environment broke"
        with pytest.raises(shmsync.WorkerFailed, match=said) as caught:
            for version in range(3, 100):
                pub.publish(stamped(version), wait=[0, 1])
        error = caught.value
        assert "Inside the `with` the others go on, and workers.restart(" in str(error)
        assert isinstance(error.__cause__, ValueError)
        assert "in fail_at" in str(error.__cause__.__cause__)
        assert error.version >= 3
        (rank,) = error.missing
        assert rank in (0, 1)
        with pytest.raises(shmsync.WorkerFailed) as other:  # that of the other one; each is raised once
            while True:
                pub.publish(stamped(pub.version + 1), wait=True)
        assert other.value.missing == [1 - rank]
        assert pub.publish(stamped(pub.version + 1), wait=True)
        until(lambda: workers.alive == [])


def test_an_exception_is_printed_at_once_and_raised_by_a_call_that_waits_for_nothing(pub, capfd):
    with shmsync.Workers(pub, jobs.fail_at, 2, args=(2,), start_method="fork") as workers:
        pub.publish(stamped(2))
        until(lambda: workers.alive == [])
        assert "shmsync-worker-1 (pid " in (printed := capfd.readouterr().err)
        assert printed.count("ValueError: the environment broke") == 2
        for call in (pub.publish, pub.update().__enter__):
            with pytest.raises(shmsync.WorkerFailed, match="the environment broke"):
                call()
        assert pub.version == 2
        assert pub.publish() == 3  # each is raised once


def test_other_processes_see_how_a_worker_failed_until_it_is_started_again(capsys):
    def shown(*arguments):
        assert cli.main(arguments) == 0
        return capsys.readouterr().out

    with shmsync.Publisher(stamped(1)) as pub:
        each = [["list"], ["inspect", pub.name], ["top", pub.name, "--count", "1"]]
        with shmsync.Workers(pub, jobs.fail_at, 1, args=(2,)) as workers:
            assert not any("failed" in shown(*command) for command in each)
            pub.publish(stamped(2))
            until(lambda: workers.alive == [])
            assert all("worker 0 failed: ValueError" in shown(*command) for command in each)
            with pytest.raises(shmsync.WorkerFailed):
                pub.publish(stamped(3))
        with shmsync.Workers(pub, apply, 1) as workers:
            assert not any("failed" in shown(*command) for command in each)
            workers.procs[0].kill()
            until(lambda: workers.alive == [])
            with pytest.raises(shmsync.WorkerDied):
                pub.publish(stamped(3))
            assert all("worker 0 died: " in shown(*command) for command in each)


def test_an_argument_that_fails_in_the_worker_is_named(pub):
    with pytest.raises(shmsync.WorkerFailed, match="no such device") as caught:
        shmsync.Workers(pub, jobs.apply, 1, args=(Unloadable(),)).start()
    assert isinstance(caught.value.__cause__, OSError)
    assert "in no_device" in str(caught.value.__cause__.__cause__)


def test_an_exit_before_it_is_attached_is_a_death(pub):
    with pytest.raises(shmsync.WorkerDied, match="exit code 0.* before it was attached"):
        shmsync.Workers(pub, jobs.apply, 1, args=(Unloadable(os._exit, 0),)).start()


@pytest.mark.parametrize("kind", [ValueError, jobs.Odd])
def test_an_exception_that_no_call_has_raised_is_raised_on_leaving(pub, kind):
    failed = pytest.raises(shmsync.WorkerFailed, match=kind.__name__)
    with failed, shmsync.Workers(pub, jobs.fail_at, 1, args=(2, kind)):
        pub.publish(stamped(2))
        until(lambda: not pub.readers())


def test_the_callers_own_error_comes_first(pub, capfd):
    with (
        pytest.raises(KeyError),
        shmsync.Workers(pub, jobs.fail_at, 1, args=(2,), start_method="fork") as workers,
    ):
        pub.publish(stamped(2))
        until(lambda: workers.alive == [])
        raise KeyError
    assert "the environment broke" in capfd.readouterr().err


def test_a_worker_that_fails_at_once_ends_the_entry_or_the_first_wait(pub):
    with pytest.raises(shmsync.WorkerFailed, match="ZeroDivisionError"), shmsync.Workers(pub, fail_at_once, 2):
        pub.publish(wait=True)
    assert pub.readers() == []


@pytest.mark.parametrize(("code", "raises"), [(0, False), (3, True)])
def test_sys_exit_is_an_end_or_an_error(pub, code, raises):
    def run():
        with shmsync.Workers(pub, exit_with, 1, args=(code,)) as workers:
            until(lambda: workers.alive == [])

    if raises:
        with pytest.raises(shmsync.WorkerFailed, match="SystemExit: 3"):
            run()
    else:
        run()


def test_a_failed_start_may_be_tried_again(pub, tmp_path):
    flag = tmp_path / "flag"
    workers = shmsync.Workers(pub, fail_without, 1, args=(str(flag),))
    for _ in range(2):
        with pytest.raises(shmsync.WorkerFailed, match="no flag"):
            # The first publish may return: a worker that is just attaching acks its version, and fails later.
            workers.start(), [pub.publish(wait=True) for _ in range(2)]
        workers.close()
    flag.touch()
    with workers:
        assert pub.publish(wait=True) == pub.readers()[0].acked


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_queue_of_the_workers_raises_what_they_fail_with(pub, method):
    workers = shmsync.Workers(pub, put_or_fail, 2, start_method=method)
    answers = workers.queue(maxsize=3)
    with workers:
        assert sorted([workers.get(), answers.get()]) == [(0, 1), (1, 1)]
        with pytest.raises(shmsync.AckTimeout, match=r"within 0.1 s"):
            workers.get(timeout=0.1)
        with pytest.raises(queue.Empty):
            answers.get(timeout=0.1)
        pub.publish()
        for rank in (0, 1):
            with pytest.raises((shmsync.WorkerFailed, shmsync.WorkerDied)) as caught:
                while True:
                    answers.get()
            assert isinstance(caught.value, shmsync.WorkerFailed) == (caught.value.missing == [0]), rank
        with pytest.raises(shmsync.ProtocolError, match="no worker runs"):
            workers.get(timeout=math.inf)
        with pytest.raises(shmsync.ProtocolError, match="before they are started"):
            workers.queue()


def put_tensors(sub, answers):
    answers.put(torch.arange(3).numpy())
    answers.put(torch.arange(3))


def test_an_item_that_went_with_its_worker_is_a_death_and_the_others_are_there(pub):
    workers = shmsync.Workers(pub, put_tensors, 1)
    workers.queue()
    with workers:
        until(lambda: not workers.alive)
        assert workers.get().tolist() == [0, 1, 2]
        with pytest.raises(shmsync.WorkerDied, match=r"lost.*tensor.numpy\(\)"):
            workers.get()
        with pytest.raises(shmsync.ProtocolError, match="no worker runs"):
            workers.get()


def put_for_ever(sub, *answers):
    while sub.publisher_alive:
        sub.refresh()
        for each in answers:
            with contextlib.suppress(queue.Full):
                each.put(sub.version, timeout=0.01)


def take_until(ends, answers):
    taken = 0
    while time.monotonic() < ends:
        answers.get()
        taken += 1
    return taken


def test_threads_may_publish_and_take_answers_at_once(pub):
    workers = shmsync.Workers(pub, put_for_ever, 2)
    answers = [workers.queue(maxsize=8), workers.queue(maxsize=8)]
    ends = time.monotonic() + 2
    with workers:
        taking = [Call(take_until, ends, each) for each in answers]
        while time.monotonic() < ends:
            pub.publish()
        assert all(each.result() for each in taking)
