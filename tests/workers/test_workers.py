"""Workers: processes that are attached when the `with` is entered, and gone when it is left."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import shmsync
from support.calls import Call
from support.jobs import workers as jobs
from support.processes import alive, kill, stop, until
from support.weights import stamped

METHODS = ["forkserver", "spawn", "fork"]
pytestmark = pytest.mark.timeout(600)  # a spawned process imports torch afresh


@pytest.fixture
def pub():
    with shmsync.Publisher(stamped(1), slots=2, timeout=120.0) as made:
        yield made


def queue(method="forkserver"):
    return multiprocessing.get_context(method).SimpleQueue()


def pids(workers):
    return [process.pid for process in workers.procs]


@pytest.mark.parametrize("method", METHODS)
def test_workers_are_attached_on_entry_apply_each_version_and_end_on_leaving(method):
    answers = queue(method)
    with (
        shmsync.Publisher(stamped(1), slots=2, timeout=120.0) as pub,
        shmsync.Workers(pub, jobs.report_versions, 2, args=(answers,), start_method=method, threads=3) as workers,
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
    with shmsync.Workers(pub, jobs.report_slowly, 1, args=(answers, begun, go_on), timeout=120.0) as workers:
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
    with shmsync.Workers(pub, jobs.wait_for_good, 1, args=(answers,)):
        pass
    assert "has left the Workers" in answers.get()


def test_closing_the_publisher_first_ends_them_too():
    with shmsync.Publisher(stamped(1), timeout=120.0) as pub, shmsync.Workers(pub, jobs.apply, 1) as workers:
        (process,) = workers.procs
        pub.close()
        process.join()
        assert process.exitcode == 0


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_is_raised_by_the_next_publish_that_waits(method):
    with (
        shmsync.Publisher(stamped(1), timeout=120.0) as pub,
        shmsync.Workers(pub, jobs.fail_at, 2, args=(3,), start_method=method) as workers,
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


@pytest.mark.parametrize("kind", [ValueError, jobs.Odd])
def test_an_exception_that_no_call_has_raised_is_raised_on_leaving(pub, kind):
    failed = pytest.raises(shmsync.WorkerFailed, match=kind.__name__)
    with failed, shmsync.Workers(pub, jobs.fail_at, 1, args=(2, kind)):
        pub.publish(stamped(2))
        until(lambda: not pub.readers())


def test_the_callers_own_error_comes_first(pub, caplog):
    with (
        caplog.at_level(logging.WARNING, "shmsync"),
        pytest.raises(KeyError),
        shmsync.Workers(pub, jobs.fail_at, 1, args=(2,)) as workers,
    ):
        pub.publish(stamped(2))
        until(lambda: workers.alive == [])
        raise KeyError
    assert "the environment broke" in caplog.text


def test_a_worker_that_fails_at_once_ends_the_entry_or_the_first_wait(pub):
    with pytest.raises(shmsync.WorkerFailed, match="ZeroDivisionError"), shmsync.Workers(pub, jobs.fail_at_once, 2):
        pub.publish(wait=True)
    assert pub.readers() == []


def test_a_worker_may_return_early(pub):
    answers = queue()
    with shmsync.Workers(pub, jobs.return_at_once, 2, args=(answers,)) as workers:
        assert sorted(answers.get() for _ in range(2)) == [0, 1]
        until(lambda: workers.alive == [])
        assert pub.publish(wait=True) == 2


@pytest.mark.parametrize(("code", "raises"), [(0, False), (3, True)])
def test_sys_exit_is_an_end_or_an_error(pub, code, raises):
    def run():
        with shmsync.Workers(pub, jobs.exit_with, 1, args=(code,)) as workers:
            until(lambda: workers.alive == [])

    if raises:
        with pytest.raises(shmsync.WorkerFailed, match="SystemExit: 3"):
            run()
    else:
        run()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wait", [True, [0, 1]])
def test_a_death_names_pid_and_signal(method, wait):
    with (
        shmsync.Publisher(stamped(1), slots=2, timeout=120.0) as pub,
        shmsync.Workers(pub, jobs.apply, 2, start_method=method) as workers,
    ):
        pid = pids(workers)[1]
        kill(pid)
        with pytest.raises(shmsync.WorkerDied, match=rf"worker 1 died \(pid {pid}, killed by SIGKILL\)") as caught:
            pub.publish(stamped(2), wait=wait)
        assert (caught.value.missing, caught.value.version) == ([1], 2)
        assert workers.alive == [0]
        workers.restart(1)
        assert workers.alive == [0, 1]
        assert pids(workers)[1] != pid
        assert pub.publish(stamped(3), wait=[0, 1]) == 3


def test_each_death_is_raised_once(pub):
    with shmsync.Workers(pub, jobs.die_at, 2, args=(2,)):  # they have applied version 2, so a later wait finds it
        for _ in range(2):
            with pytest.raises(shmsync.WorkerDied, match="killed by SIGKILL"):
                while True:
                    pub.publish(wait=True)
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
    with shmsync.Workers(pub, jobs.die_at, 2, args=(2, signal.SIGKILL, once), restart=1) as workers:
        pub.publish(stamped(2))  # a wait would start it again
        until(lambda: workers.alive == [1])
        with pub.update(wait=[0, 1]) as weights:
            weights["large"].fill_(3)
        assert workers.alive == [0, 1]


def test_restart_replaces_a_living_worker(pub):
    with shmsync.Workers(pub, jobs.apply, 2) as workers:
        before = pids(workers)
        workers.restart(0)
        assert not alive(before[0])
        assert pids(workers)[1] == before[1]
        pub.publish(wait=[0, 1])
        with pytest.raises(ValueError, match=r"no worker 2, the workers are \[0, 1\]"):
            workers.restart(2)


def test_what_does_not_return_is_terminated(pub, caplog):
    ready = multiprocessing.get_context("forkserver").Event()
    for work, args in ((jobs.never_returns, ()), (jobs.deaf, (ready,))):
        with (
            caplog.at_level(logging.WARNING, "shmsync"),
            shmsync.Workers(pub, work, 1, args=args) as workers,
        ):
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


def test_each_worker_draws_numbers_of_its_own_and_the_same_in_each_run(pub):
    def drawn():
        answers = queue()
        torch.manual_seed(5)
        with shmsync.Workers(pub, jobs.draw, 3, args=(answers,)):
            return sorted(answers.get() for _ in range(3))

    first = drawn()
    assert first == drawn()
    assert len({number for _, number, _ in first}) == len({number for _, _, number in first}) == 3


def test_a_worker_may_have_children_and_a_bound_module():
    answers = queue()
    policy = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(policy.weight)
    with shmsync.Publisher(policy, timeout=120.0) as pub:
        with shmsync.Workers(pub, jobs.has_children, 1, args=(answers,)):
            assert answers.get() == "7"
        with shmsync.Workers(pub, jobs.forward, 1, args=(answers,)):
            assert answers.get() == (1, 4.0)
            torch.nn.init.constant_(policy.weight, 2.0)
            pub.publish(wait=True)
            assert answers.get() == (2, 8.0)


@pytest.mark.parametrize("form", ["object", "partial"])
def test_callables_that_hold_a_queue(pub, form):
    answers = queue()
    work = jobs.Job(answers) if form == "object" else functools.partial(jobs.return_at_once, answers=answers)
    with shmsync.Workers(pub, work, 2):
        assert sorted(answers.get() for _ in range(2)) == [0, 1]


def test_functions_that_no_worker_can_import_are_refused_before_a_process_is_started(pub):
    def inner(sub):
        pass

    for work in (inner, lambda sub: None, functools.partial(inner)):
        with pytest.raises(shmsync.ProtocolError, match=r"cannot import .*put it into a file.*start_method='fork'"):
            shmsync.Workers(pub, work, 1)
    with shmsync.Workers(pub, inner, 2, start_method="fork"):
        pass


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue", "Event", "Lock"])
def test_what_forked_processes_alone_can_use_is_refused_with_the_cure(pub, kind, method):
    forked = getattr(multiprocessing.get_context("fork"), kind)()
    said = rf"get_context\('{method}'\)\.Queue\(\), or pass start_method='fork'"
    with (
        pytest.raises(shmsync.ProtocolError, match=said),
        shmsync.Workers(pub, jobs.apply, 2, args=(forked,), start_method=method),
    ):
        pass
    assert pub.readers() == []
    with shmsync.Workers(pub, jobs.ignore, 1, args=(forked,), start_method="fork") as workers:
        assert workers.alive == [0]


def test_workers_that_are_not_started_are_not_waited_for(pub):
    """Refused before anything is written; other waits go on."""
    workers = shmsync.Workers(pub, jobs.apply, 2)
    calls = [lambda wait=wait: pub.publish(stamped(2), wait=wait) for wait in (True, "all", [0], [5, 1])]
    calls += [lambda: pub.update(wait=True).__enter__(), lambda: pub.wait_readers([1]), pub.verify]
    for call in calls:
        with pytest.raises(shmsync.ProtocolError, match=r"2 Workers .* made but not started.*workers\.start\(\)"):
            call()
        assert pub.version == 1
    with shmsync.Subscriber(pub.handle, worker=2):
        with pytest.raises(shmsync.AckTimeout):
            pub.publish(stamped(2), wait=[2], timeout=0.1)
        pub.wait_readers([2])
    pub.publish(stamped(3), wait=[])
    workers.close()  # they will not be started
    pub.publish(stamped(4), wait=True)
    with pytest.warns(RuntimeWarning, match="never started"):
        shmsync.Workers(pub, jobs.apply, 2)
    pub.publish(stamped(5), wait=True)


def test_a_failed_start_may_be_tried_again(pub, tmp_path):
    flag = tmp_path / "flag"
    workers = shmsync.Workers(pub, jobs.fail_without, 1, args=(str(flag),))
    for _ in range(2):
        with pytest.raises(shmsync.WorkerFailed, match="no flag"):
            # The first publish may return: a worker that is just attaching acks its version, and fails later.
            workers.start(), [pub.publish(wait=True) for _ in range(2)]
        workers.close()
    flag.touch()
    with workers:
        assert pub.publish(wait=True) == pub.readers()[0].acked


def test_workers_without_a_with(pub):
    workers = shmsync.Workers(pub, jobs.apply, 2)
    with pytest.raises(ValueError, match="none was started"):
        workers.restart(0)
    assert workers.start() is workers
    pub.publish(stamped(2), wait=True)
    assert [(reader.worker, reader.acked) for reader in pub.readers()] == [(0, 2), (1, 2)]
    with pytest.raises(shmsync.ProtocolError, match="has Workers already"):
        workers.start()
    ended, others = pids(workers), shmsync.Workers(pub, jobs.apply, 1)
    others.close()  # never started; it ends nothing of the others
    kill(ended[1])
    with pytest.raises(shmsync.WorkerDied, match=r"worker 1 died .*SIGKILL"):
        pub.publish(stamped(3), wait=True)
    for _ in range(2):
        workers.close()
        assert workers.procs == [] and not any(map(alive, ended))
    pub.publish(stamped(4), wait=True)  # these workers have ended, and others need not follow
    with workers:
        assert workers.alive == [0, 1]


def test_closing_in_a_finally_keeps_the_callers_error(pub, caplog):
    workers = shmsync.Workers(pub, jobs.fail_at, 1, args=(2,)).start()
    with pytest.raises(ZeroDivisionError), caplog.at_level(logging.WARNING, "shmsync"):
        try:
            pub.publish(stamped(2))
            until(lambda: not workers.alive)
            raise ZeroDivisionError
        finally:
            workers.close()
    assert "the environment broke" in caplog.text


def test_closing_is_no_death_to_a_wait_of_another_thread(pub):
    """The workers never apply a version; restart= would start them again while they are ended."""
    ready = multiprocessing.get_context("forkserver").Event()
    workers = shmsync.Workers(pub, jobs.deaf, 3, args=(ready,), restart=3).start()
    ready.wait()
    ended = pids(workers)
    waiting = Call(pub.publish, stamped(2), wait=True)
    until(lambda: pub.version == 2)
    workers._timeout = 0.1
    workers.close()
    assert waiting.result() == 2
    assert workers.procs == [] and pub.readers() == [] and not any(map(alive, ended))
    pub.publish(stamped(3), wait=True)


def test_every_row_of_an_ended_worker_is_freed_and_no_other(pub):
    with shmsync.Workers(pub, jobs.attach_more, 1) as workers, shmsync.Subscriber(pub.handle, worker=5):
        until(lambda: sorted(reader.worker or 0 for reader in pub.readers()) == [0, 0, 5, 7])
        workers._timeout = 0.1
    assert [reader.worker for reader in pub.readers()] == []  # the last one has left by itself
    pub.publish(stamped(2), wait=True)


def test_wrong_arguments(pub):
    for wrong, error in (
        ({"n": 0}, ValueError),
        ({"n": 1.5}, TypeError),
        ({"threads": 0}, ValueError),
        ({"restart": -1}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"start_method": "thread"}, ValueError),
        ({"work": 3}, TypeError),
        ({"pub": pub.handle}, TypeError),
    ):
        arguments = {"pub": pub, "work": jobs.apply, "n": 1} | wrong
        with pytest.raises(error):
            shmsync.Workers(arguments.pop("pub"), arguments.pop("work"), arguments.pop("n"), **arguments)


# ---- programs of their own

COMMON = """
import os, signal, sys, torch, shmsync
def make(): return torch.nn.Linear(2, 1)
"""


def program(folder: Path, text: str, *, how: str = "file") -> subprocess.CompletedProcess[str]:
    if how == "file":
        (folder / "program.py").write_text(text)
    command = {"file": [sys.executable, "program.py"], "-c": [sys.executable, "-c", text], "-i": [sys.executable, "-i"]}
    return subprocess.run(
        command[how], cwd=folder, text=True, capture_output=True, input=text if how == "-i" else "", timeout=500
    )


WORK = """
def work(sub):
    for version in sub.versions():
        pass

"""
START = """
with shmsync.Publisher(make(), timeout=120) as pub, shmsync.Workers(pub, work, 2, start_method=METHOD) as workers:
    print("attached", workers.alive, pub.publish(wait=True), flush=True)
"""


@pytest.mark.parametrize("method", METHODS)
def test_functions_of_a_script(tmp_path, method):
    guarded = "if __name__ == '__main__':" + START.replace("METHOD", repr(method)).replace("\n", "\n    ")
    done = program(tmp_path, COMMON + WORK + guarded)
    assert (done.returncode, done.stdout, done.stderr) == (0, "attached [0, 1] 2\n", "")


@pytest.mark.parametrize("how", ["-c", "-i"])
def test_functions_of_no_file_are_an_error_at_once_or_are_forked(tmp_path, how):
    done = program(tmp_path, COMMON + WORK + START.replace("METHOD", "'spawn'"), how=how)
    assert "ProtocolError: the workers cannot import work of __main__" in done.stderr
    assert "put it into a file" in done.stderr
    done = program(tmp_path, COMMON + WORK + START.replace("METHOD", "'fork'"), how=how)
    assert "attached [0, 1] 2\n" in done.stdout


def test_a_script_without_the_main_line_is_told_about_it(tmp_path):
    done = program(tmp_path, COMMON + WORK + START.replace("METHOD", "'spawn'"))
    assert done.returncode == 1
    assert 'A script needs `if __name__ == "__main__":`' in done.stderr


INTERRUPTED = """
def work(sub):
    open(f"worker-{sub.worker}", "w").write(str(os.getpid()))
    for version in sub.versions():
        pass

if __name__ == "__main__":
    with shmsync.Publisher(make(), timeout=120) as pub, shmsync.Workers(pub, work, 2, start_method=METHOD) as workers:
        while True:
            pub.publish(wait=True)
"""


def started(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "program.py"]
    # A shell lets its background jobs ignore SIGINT, and so what they start.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=folder, start_new_session=True, stderr=subprocess.PIPE, preexec_fn=heed)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("when", ["starting", "running"])
def test_ctrl_c_leaves_nothing_behind(tmp_path, method, when):
    (tmp_path / "program.py").write_text(COMMON + INTERRUPTED.replace("METHOD", repr(method)))
    with started(tmp_path) as run:
        wanted = 1 if when == "starting" else 2
        until(lambda: len([each for each in tmp_path.glob("worker-*") if each.read_text()]) >= wanted)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        errors = run.stderr.read().decode()
        assert run.wait() == -signal.SIGINT, errors
    for each in tmp_path.glob("worker-*"):
        if each.read_text():
            pid = int(each.read_text())
            until(lambda pid=pid: not alive(pid))
    assert not list(Path("/dev/shm").glob(f"shmsync.{run.pid}-*"))
    if when == "running":  # a process that still imports torch has Python's own handler
        assert errors.count("KeyboardInterrupt") == 1, errors


def test_a_killed_trainer_takes_its_waiting_workers_along(tmp_path):
    (tmp_path / "program.py").write_text(COMMON + INTERRUPTED.replace("METHOD", "'forkserver'"))
    with started(tmp_path) as run:
        until(lambda: len([each for each in tmp_path.glob("worker-*") if each.read_text()]) == 2)
        workers = [int(each.read_text()) for each in tmp_path.glob("worker-*")]
        run.kill()
        run.wait()
        for pid in workers:
            until(lambda pid=pid: not alive(pid))
    for path in Path("/dev/shm").glob(f"shmsync.{run.pid}-*"):
        path.unlink(missing_ok=True)
