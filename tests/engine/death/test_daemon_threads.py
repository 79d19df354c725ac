"""A process exits while a daemon thread of it is in one of our waits: exit code 0, and nothing on stderr."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from support.choice import first

START = """
import contextlib, math, multiprocessing, sys, threading
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
EACH = """
kept = []
for wait in sys.argv[1:]:
    kept.append(dict(globals()))
    exec(wait, kept[-1])
"""

# Each starts a daemon thread that waits, or never rests. The process exits when those of a group do.
GROUPS = {
    "a publisher waits": {
        "publish waits for acks": """
            pub, sub = both(slots=2, worker=0)
            daemon(lambda: pub.publish(wait="all", timeout=for_ever), "wait_for_acks")
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
    },
    "a reader waits": {
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
        "a scheme's receive": """
            ours, theirs = multiprocessing.Pipe()
            scheme = shmsync.SharedMemWeightSyncScheme()
            net = torch.nn.Linear(2, 2)
            scheme.init_on_worker("policy", pipe=theirs, model=net)
            receiver = scheme.get_receiver()
            daemon(lambda: receiver.receive(timeout=10**6), "receive")
        """,
    },
    "without pause": {
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
    },
}

COLLECTORS = """
import psutil
from support.environments.basic import Constant, Counting
from shmsync.collectors import MultiprocessCollector

def collector():
    batches = MultiprocessCollector(Counting, Constant(), num_workers=1, frames_per_batch=10)
    next(batches)
    return batches, psutil.Process(next(iter(batches._pool.members.values())).process.pid)

if __name__ == "__main__":
    waits_for_a_batch, one = collector()
    one.suspend()
    daemon(lambda: next(waits_for_a_batch), "wait")
    waits_for_acks, other = collector()
    other.suspend()
    daemon(waits_for_acks.update_policy_weights_, "send")
    never_rests, _ = collector()
    busy(lambda: next(never_rests))
    one.resume()
    other.resume()
"""


@pytest.mark.full  # collectors; the other waits of a daemon thread are below
def test_daemon_threads_in_collectors_do_not_disturb_the_exit(tmp_path):
    pytest.importorskip("gymnasium", reason="collectors need gymnasium, which shmsync[collectors] brings")
    program = tmp_path / "program.py"
    program.write_text(START + COLLECTORS)
    done = subprocess.run([sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full  # a process that ends late
def test_somebody_may_wait_for_a_daemon_thread_at_exit():
    """Its wait ends, late and with an error, so that the process ends too."""
    before = """
import atexit
thread = None
atexit.register(lambda: thread.join())
"""  # registered before those of the handles, so it is called after them
    wait = """
pub, sub = both()
thread = threading.Thread(target=lambda: sub.wait_version(9, timeout=for_ever), daemon=True)
thread.start()
until_waits(thread, "_wait_for")
"""
    command = [sys.executable, "-c", before + START + wait]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert "ClosedError" in done.stderr


@pytest.mark.parametrize("group", first(GROUPS))
def test_daemon_threads_in_waits_do_not_disturb_the_exit(group):
    waits = map(textwrap.dedent, GROUPS[group].values())
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", START + EACH, *waits],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
