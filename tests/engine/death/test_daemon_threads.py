"""A process exits while a daemon thread of it is in one of our waits: exit code 0, and nothing on stderr."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from support.choice import first

START = """
import contextlib, math, multiprocessing, threading
import torch
import shmsync
from support.processes import until_waits

def daemon(call, where):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until_waits(thread, where)

def busy(step):
    begun = threading.Event()
    def run():
        while True:
            step()
            begun.set()
    threading.Thread(target=run, daemon=True).start()
    begun.wait()

def enter(sub, **kwargs):
    with sub.read(**kwargs):
        pass

def open_section(sub):
    section = sub.read()
    section.__enter__()
    return section

def both(slots=1, **options):
    pub = shmsync.Publisher({"t": torch.zeros(4)}, slots=slots)
    return pub, shmsync.Subscriber(pub.handle, **options)

for_ever = math.inf
"""

# Each ends with a daemon thread in a wait; then the process exits.
WAITS = {
    "publish waits for acks": """
        pub, sub = both(slots=2, worker=0)
        daemon(lambda: pub.publish(wait="all", timeout=for_ever), "wait_for_acks")
    """,
    "publish waits for a worker that is not there": """
        pub = shmsync.Publisher({"t": torch.zeros(4)}, slots=2)
        daemon(lambda: pub.publish(wait=[5], timeout=for_ever), "wait_for_acks")
    """,
    "update waits for acks": """
        pub = shmsync.Publisher({"t": torch.zeros(4)}, slots=2)
        def update():
            with pub.update(wait=[5], timeout=for_ever):
                pass
        daemon(update, "wait_for_acks")
    """,
    "publish waits for a section": """
        pub, sub = both()
        section = open_section(sub)
        daemon(lambda: pub.publish(timeout=for_ever), "begin")
    """,
    "update waits for a section": """
        pub, sub = both()
        section = open_section(sub)
        daemon(lambda: pub.update(timeout=for_ever).__enter__(), "begin")
    """,
    "a reader waits at a closed gate": """
        pub, sub = both()
        update = pub.update()
        update.__enter__()
        daemon(lambda: enter(sub, timeout=for_ever), "_try_again")
    """,
    "an optimistic reader waits at a closed gate": """
        pub, sub = both(consistency="optimistic")
        update = pub.update()
        update.__enter__()
        daemon(lambda: sub.run(print), "run")
    """,
    "wait_version": """
        pub, sub = both()
        daemon(lambda: sub.wait_version(9, timeout=for_ever), "_wait_for")
    """,
    "wait_version in a section": """
        pub, sub = both(slots=2)
        daemon(lambda: enter(sub, version=9, timeout=for_ever), "_wait_for")
    """,
    "a reader waits for another thread's section": """
        pub, sub = both()
        section = open_section(sub)
        daemon(lambda: enter(sub, timeout=for_ever), "enter")
    """,
    "sections without pause": """
        pub, sub = both()
        busy(lambda: enter(sub))
    """,
    "waits without pause": """
        pub, sub = both(slots=2)
        def wait():
            with contextlib.suppress(shmsync.PublishTimeout):
                sub.wait_version(9, timeout=0.001)
        busy(wait)
    """,
    "publishes without pause": """
        pub = shmsync.Publisher({"t": torch.zeros(4)}, slots=2)
        def publish():
            with pub.update():
                pass
        busy(publish)
    """,
    "a scheme's receive": """
        ours, theirs = multiprocessing.Pipe()
        scheme = shmsync.SharedMemWeightSyncScheme()
        net = torch.nn.Linear(2, 2)
        scheme.init_on_worker("policy", pipe=theirs, model=net)
        receiver = scheme.get_receiver()
        daemon(lambda: receiver.receive(timeout=10**6), "receive")
    """,
}

COLLECTOR = """
        from support.environments.basic import Constant, Counting
        from shmsync.collectors import MultiprocessCollector
        if __name__ == "__main__":
            batches = MultiprocessCollector(Counting, Constant(), num_workers=1, frames_per_batch=10)
            next(batches)
            child = psutil.Process(next(iter(batches._pool.members.values())).process.pid)
            child.suspend()
"""
COLLECTORS = {
    "a collector waits for a batch": """
            daemon(lambda: next(batches), "wait")
            child.resume()
    """,
    "a collector waits for acks of weights": """
            daemon(batches.update_policy_weights_, "send")
            child.resume()
    """,
    "batches without pause": """
            child.resume()
            busy(lambda: next(batches))
    """,
}


@pytest.mark.full  # a collector; the other waits of a daemon thread are below
@pytest.mark.parametrize("wait", first(COLLECTORS))
def test_a_daemon_thread_in_a_collector_does_not_disturb_the_exit(wait, tmp_path):
    pytest.importorskip("gymnasium", reason="collectors need gymnasium, which shmsync[collectors] brings")
    program = tmp_path / "program.py"
    program.write_text(START + "import psutil\n" + textwrap.dedent(COLLECTOR + COLLECTORS[wait].lstrip("\n")))
    done = subprocess.run([sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full  # a process that ends late
def test_somebody_may_wait_for_a_daemon_thread_at_exit():
    """Its wait ends, late and with an error, so that the process ends too."""
    first = """
import atexit
thread = None
atexit.register(lambda: thread.join())
"""  # before the handles' own, so it is called after those
    source = (
        first
        + START
        + textwrap.dedent("""
        pub, sub = both()
        thread = threading.Thread(target=lambda: sub.wait_version(9, timeout=for_ever), daemon=True)
        thread.start()
        until_waits(thread, "_wait_for")
    """)
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert "ClosedError" in done.stderr


@pytest.mark.parametrize("wait", first(WAITS))
def test_a_daemon_thread_in_a_wait_does_not_disturb_the_exit(wait):
    source = START + textwrap.dedent(WAITS[wait])
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", source], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
