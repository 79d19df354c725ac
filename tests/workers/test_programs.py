"""Workers of scripts and of interactive sessions, and what Ctrl-C leaves of them."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import alive, until

COMMON = """
import os, signal, sys, torch, shmsync
def make(): return torch.nn.Linear(2, 1)
"""


def program(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text)
    return subprocess.run([sys.executable, "program.py"], cwd=folder, text=True, capture_output=True, timeout=500)


WORK = """
def work(sub):
    for version in sub.versions():
        pass

"""
START = """
with shmsync.Publisher(make(), timeout=120) as pub, shmsync.Workers(pub, work, 1, start_method="spawn") as workers:
    print("attached", workers.alive, pub.publish(wait=True), flush=True)
"""


def test_functions_of_a_script(tmp_path):
    guarded = "if __name__ == '__main__':" + START.replace("\n", "\n    ")
    done = program(tmp_path, COMMON + WORK + guarded)
    assert (done.returncode, done.stdout, done.stderr) == (0, "attached [0] 2\n", "")


@pytest.mark.slow
def test_a_script_without_the_main_line_is_told_about_it(tmp_path):
    done = program(tmp_path, COMMON + WORK + START)
    assert done.returncode == 1
    assert 'A script needs `if __name__ == "__main__":`' in done.stderr


BOTH = """
def work(sub, answers):
    answers.put("gymnasium" in sys.modules)

if __name__ == "__main__":
    import shmsync.collectors
    pub = shmsync.Publisher(make(), timeout=120)
    workers = shmsync.Workers(pub, work, 1)
    workers.queue()
    with pub, workers:
        print(workers.get())
"""


@pytest.mark.slow
def test_the_fork_server_of_workers_has_imported_what_a_collector_needs(tmp_path):
    done = program(tmp_path, COMMON + BOTH)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


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


@pytest.mark.parametrize(("method", "when"), [("forkserver", "starting"), ("fork", "running")])
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
    (tmp_path / "program.py").write_text(COMMON + INTERRUPTED.replace("METHOD", "'fork'"))
    with started(tmp_path) as run:
        until(lambda: len([each for each in tmp_path.glob("worker-*") if each.read_text()]) == 2)
        workers = [int(each.read_text()) for each in tmp_path.glob("worker-*")]
        run.kill()
        run.wait()
        for pid in workers:
            until(lambda pid=pid: not alive(pid))
    for path in Path("/dev/shm").glob(f"shmsync.{run.pid}-*"):
        path.unlink(missing_ok=True)


ENDS = """
import multiprocessing, time
def sleep(): time.sleep(3600)

def work(sub):
    child = multiprocessing.get_context("fork").Process(target=sleep)
    child.start()
    print(os.getpid(), child.pid, flush=True)
    os.kill(os.getpid(), STOP)
    sleep()

if __name__ == "__main__":
    pub = shmsync.Publisher(make())
    workers = shmsync.Workers(pub, work, 1)
    workers.start()
    time.sleep(2)
    AT_LAST
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "at_last"),
    [("signal.SIGSTOP", "raise ValueError('a mistake')"), ("0", "os.kill(os.getpid(), signal.SIGKILL)")],
    ids=["an exception beside a stopped worker", "a kill beside a busy worker"],
)
def test_the_end_of_the_trainer_leaves_no_worker_and_no_child_of_one(tmp_path, stop, at_last):
    (tmp_path / "program.py").write_text(COMMON + ENDS.replace("STOP", stop).replace("AT_LAST", at_last))
    run = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with run:
        left = [int(pid) for pid in run.stdout.readline().split()]
        assert run.wait(timeout=60) == (1 if "mistake" in at_last else -signal.SIGKILL)
        assert len(left) == 2
        for pid in left:
            until(lambda pid=pid: not alive(pid))
    for path in Path("/dev/shm").glob(f"shmsync.{run.pid}-*"):
        path.unlink(missing_ok=True)
