"""A process exits while a daemon thread of it is in one of our waits: exit code 0, and nothing on stderr."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from support.choice import first

START = """
import multiprocessing, threading, math
import torch
import shmsync
from support.processes import until_waits

def daemon(call, where):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until_waits(thread, where)

def enter(sub, **kwargs):
    with sub.read(**kwargs):
        pass

for_ever = math.inf
"""

# Each ends with a daemon thread in a wait; then the process exits.
WAITS = {
    "publish waits for acks": """
        pub = shmsync.Publisher({"t": torch.zeros(4)}, slots=2)
        sub = shmsync.Subscriber(pub.handle, worker=0)
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
        pub = shmsync.Publisher({"t": torch.zeros(4)})
        sub = shmsync.Subscriber(pub.handle)
        section = sub.read()
        section.__enter__()
        daemon(lambda: pub.publish(timeout=for_ever), "begin")
    """,
    "update waits for a section": """
        pub = shmsync.Publisher({"t": torch.zeros(4)}, timeout=for_ever)
        sub = shmsync.Subscriber(pub.handle)
        section = sub.read()
        section.__enter__()
        daemon(lambda: pub.update().__enter__(), "begin")
    """,
    "a reader waits at a closed gate": """
        pub = shmsync.Publisher({"t": torch.zeros(4)})
        sub = shmsync.Subscriber(pub.handle)
        update = pub.update()
        update.__enter__()
        daemon(lambda: enter(sub, timeout=for_ever), "_try_again")
    """,
    "an optimistic reader waits at a closed gate": """
        pub = shmsync.Publisher({"t": torch.zeros(4)})
        sub = shmsync.Subscriber(pub.handle, consistency="optimistic")
        update = pub.update()
        update.__enter__()
        daemon(lambda: sub.run(print), "run")
    """,
    "wait_version": """
        pub = shmsync.Publisher({"t": torch.zeros(4)})
        sub = shmsync.Subscriber(pub.handle)
        daemon(lambda: sub.wait_version(9, timeout=for_ever), "_wait_for")
    """,
    "wait_version in a section": """
        pub = shmsync.Publisher({"t": torch.zeros(4)}, slots=2)
        sub = shmsync.Subscriber(pub.handle)
        daemon(lambda: enter(sub, version=9, timeout=for_ever), "_wait_for")
    """,
    "a reader waits for another thread's section": """
        pub = shmsync.Publisher({"t": torch.zeros(4)})
        sub = shmsync.Subscriber(pub.handle)
        section = sub.read()
        section.__enter__()
        daemon(lambda: enter(sub, timeout=for_ever), "enter")
    """,
    "sections without pause": """
        pub = shmsync.Publisher({"t": torch.zeros(4)})
        sub = shmsync.Subscriber(pub.handle)
        begun = threading.Event()
        def read():
            while True:
                enter(sub)
                begun.set()
        threading.Thread(target=read, daemon=True).start()
        begun.wait()
    """,
    "waits without pause": """
        pub = shmsync.Publisher({"t": torch.zeros(4)}, slots=2)
        sub = shmsync.Subscriber(pub.handle)
        begun = threading.Event()
        def wait():
            while True:
                try:
                    begun.set()
                    sub.wait_version(9, timeout=0.001)
                except shmsync.PublishTimeout:
                    pass
        threading.Thread(target=wait, daemon=True).start()
        begun.wait()
    """,
    "publishes without pause": """
        pub = shmsync.Publisher({"t": torch.zeros(4)}, slots=2)
        begun = threading.Event()
        def publish():
            while True:
                with pub.update():
                    begun.set()
        threading.Thread(target=publish, daemon=True).start()
        begun.wait()
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
            begun = threading.Event()
            def collect():
                for batch in batches:
                    begun.set()
            threading.Thread(target=collect, daemon=True).start()
            begun.wait()
    """,
}


@pytest.mark.parametrize("wait", first(COLLECTORS))
def test_a_daemon_thread_in_a_collector_does_not_disturb_the_exit(wait, tmp_path):
    pytest.importorskip("gymnasium", reason="collectors need gymnasium, which shmsync[collectors] brings")
    program = tmp_path / "program.py"
    program.write_text(START + "import psutil\n" + textwrap.dedent(COLLECTOR + COLLECTORS[wait].lstrip("\n")))
    done = subprocess.run([sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


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
        pub = shmsync.Publisher({"t": torch.zeros(4)})
        sub = shmsync.Subscriber(pub.handle)
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
