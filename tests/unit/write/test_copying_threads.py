"""Large copies use the threads that torch may use; those stay for a while and go by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import torch

import shmsync
from support.calls import forked_child
from support.processes import until

LARGE = 20 << 20  # bytes; from 3 MiB on helpers are started
SEVERAL = len(os.sched_getaffinity(0)) > 1
needs_two_processors = pytest.mark.skipif(not SEVERAL, reason="needs two processors, and may use one")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def helpers():
    """The ids of the threads that help to copy."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # it may end meanwhile
            found += [thread] if file.read() == "shmsync-copy\n" else []
    return found


def publish_until_helped(pub, source):
    until(lambda: pub.publish(source) and helpers())


def test_no_helper_is_started_where_torch_may_use_one_thread(publisher, threads):
    until(lambda: not helpers())
    source = {"w": torch.zeros(LARGE // 4)}
    pub = publisher(source)
    threads(1)
    for _ in range(10):
        pub.publish(source)
    assert not helpers()


@needs_two_processors
def test_a_helper_stays_for_a_while_and_goes(publisher, threads):
    threads(4)
    source = {"w": torch.zeros(LARGE // 4)}
    pub = publisher(source)
    publish_until_helped(pub, source)
    stays = helpers()
    for _ in range(20):
        pub.publish(source)
    assert helpers() == stays and len(stays) < len(os.sched_getaffinity(0))
    until(lambda: not helpers())
    publish_until_helped(pub, source)


@needs_two_processors
def test_signals_are_for_the_threads_of_the_program(publisher, threads):
    threads(2)
    source = {"w": torch.zeros(LARGE // 4)}
    publish_until_helped(publisher(source), source)
    (helper,) = helpers()
    with open(f"/proc/self/task/{helper}/status") as file:
        blocked = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk"))
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1):
        assert blocked >> (each - 1) & 1
    assert not blocked >> (signal.SIGSEGV - 1) & 1  # a write into read-only weights ends the process with its line


@needs_two_processors
def test_a_helper_stays_out_of_the_way_of_its_caller(publisher, threads):
    """Both would have one processor: then the caller copies, and the helper ends up on no other one."""
    threads(2)
    source = {"w": torch.zeros(LARGE // 4)}
    pub = publisher(source)
    allowed = os.sched_getaffinity(0)
    try:
        for here in sorted(allowed):
            os.sched_setaffinity(0, {here})
            source["w"].fill_(here)
            pub.publish(source)
            assert (pub.weights["w"] == here).all()
        os.sched_setaffinity(0, allowed)
        publish_until_helped(pub, source)
    finally:
        os.sched_setaffinity(0, allowed)


END = """
import os, signal, sys, threading
import torch
import shmsync
torch.set_num_threads(4)
source = {"w": torch.ones(5 << 20)}
pub = shmsync.Publisher(source)
names = lambda: [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
while "shmsync-copy\\n" not in names():
    pub.publish(source)
def busy():
    other = shmsync.Publisher(source)
    while True:
        other.publish(source)
if "working" in sys.argv:
    threading.Thread(target=busy, daemon=True).start()
    for _ in range(20):
        try:
            pub.publish(source)
        except shmsync.WriterBusy:
            pass
print("there", flush=True)
"""


@needs_two_processors
@pytest.mark.parametrize("helper", ["asleep", pytest.param("working", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(0)", 0),
        pytest.param("os._exit(7)", 7, marks=pytest.mark.full),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        pytest.param(
            "os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(5)'])", 5, marks=pytest.mark.full
        ),
    ],
    ids=["exit", "_exit", "SIGKILL", "exec"],
)
def test_a_process_ends_as_ever_while_it_has_a_helper(helper, end, status):
    ran = subprocess.run([sys.executable, "-Wignore", "-c", END + end, helper], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "there\n", "")


@pytest.mark.parametrize("sizes", [[LARGE // 4], [1000] * 6000, [5, LARGE // 8, 0, 77, LARGE // 8]])
@pytest.mark.parametrize("slots", [1, 2])
def test_every_byte_arrives(both, threads, sizes, slots):
    threads(3)
    source = {f"{i:05}": torch.empty(size) for i, size in enumerate(sizes)}
    pub, sub = both(source, slots=slots)
    for _ in range(4):
        for leaf in source.values():
            leaf.normal_()
        pub.publish(source)
        with sub.read() as section:
            assert all(torch.equal(section.weights[key], leaf) for key, leaf in source.items())


def test_a_forked_child_has_helpers_of_its_own(threads):
    threads(4)
    source, doubled = {"w": torch.ones(LARGE // 4)}, {"w": torch.full((LARGE // 4,), 2.0)}
    with shmsync.Publisher(source) as pub:
        if SEVERAL:
            publish_until_helped(pub, source)

        def in_child():
            assert not helpers()
            with shmsync.Publisher(source) as own:
                own.publish(doubled)
                if SEVERAL:
                    publish_until_helped(own, doubled)
                threads(1)  # torch's own threads are the parent's
                assert torch.equal(own.weights["w"], doubled["w"])

        child = forked_child(in_child)
        for _ in range(10):
            pub.publish(source)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(pub.weights["w"], source["w"])
