"""Who is who: numbers of processes that were used again, other namespaces, and zombies."""

import fcntl
import os
import re
import subprocess
import sys
import time

import pytest
import torch

import shmsync
from shmsync import cli
from support.faults.forged import OWNER, forge, identity, rows_offset, word
from support.jobs.engine import attach, begin_update, enter, leave, look, open_arena
from support.processes import segment_path, state, until
from support.weights import stamped


def fork_a_sleeper(state):
    """A child that lives on without its parent; its pid."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


TICKS = 20  # where the start ticks begin in an owner word


def used_again(owner):
    """The owner word that an earlier process with this one's pid had."""
    return owner ^ (1 << TICKS)


def test_a_publisher_whose_pid_is_somebody_elses_now(name, capsys):
    with shmsync.Publisher(stamped(1), name=name) as pub:
        owner = identity(segment_path(name))["owner"]
        with open(segment_path(name), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # other tests' publishers would remove what a dead one left
            forge(name, owner=used_again(owner))
            with pytest.raises(shmsync.WriterDied):
                shmsync.Subscriber(name, timeout=0.2)
            assert cli.main(["list"]) == 0
        assert re.search(rf"^{name} +dead", capsys.readouterr().out, re.M)
        with shmsync.Publisher(stamped(2), name=name) as heir:  # the name is free
            assert heir.handle != pub.handle
            with shmsync.Subscriber(name) as sub:
                assert sub.version == 2  # the numbers go on


def test_a_reader_whose_pid_is_somebody_elses_now(start):
    reader, heir = start(2)
    with shmsync.Publisher(stamped(1), slots=1, max_readers=1) as pub:
        reader.call(attach, pub.handle, worker=3)
        reader.call(enter)  # its pin is in the way
        with open(segment_path(pub.name), "r+b", buffering=0) as file:
            at = rows_offset(pub.name) + OWNER
            owner = int.from_bytes(os.pread(file.fileno(), 8, at), "little")
            os.pwrite(file.fileno(), word(used_again(owner)), at)
        assert pub.publish(stamped(2), timeout=5) == 2  # it is dead, so its pin counts no more
        heir.call(attach, pub.handle, worker=4)  # and its row is free
        assert heir.call(look) == (2, 2, 2)
        reader.call(leave)
        with pytest.raises(shmsync.ProtocolError, match="taken away"):
            reader.call(look)


def test_a_zombie_is_dead(start, name):
    """Its parent has not waited for it, so /proc still has it."""
    pid = os.fork()
    if pid == 0:
        try:
            shmsync.Publisher({"t": torch.ones(1)}, name=name)
            os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    until(lambda: state(pid) == "Z")
    try:
        with pytest.raises((shmsync.WriterDied, shmsync.ArenaNotFound)):  # another publisher may have removed it
            shmsync.Subscriber(name, timeout=1)
        with shmsync.Publisher(stamped(1), name=name):
            assert state(pid) == "Z"
    finally:
        os.waitpid(pid, 0)


APART = """
import sys, torch, shmsync
from shmsync import cli
name = sys.argv[1]
try:
    shmsync.Subscriber(name, timeout=0.2)
    sys.exit("it attached")
except shmsync.ArenaNotFound as error:
    assert "pid namespace" in str(error), error
try:
    shmsync.Publisher({"t": torch.ones(1)}, name=name)
    sys.exit("it took the name")
except shmsync.ArenaExists:
    pass
for command in (["gc"], ["gc", "--dry-run"], ["list"], ["inspect", name], ["doctor"]):
    cli.main(command)
with shmsync.Publisher({"t": torch.ones(1)}, name=name + ".inside") as pub, shmsync.Subscriber(pub.handle) as sub:
    pub.publish({"t": torch.zeros(1)})
    assert sub.snapshot().weights["t"] == 0
print("well")
"""


@pytest.mark.slow
def test_containers_that_share_dev_shm_alone(start, name):
    """Each leaves the other's arenas alone: their locks tell that they live."""
    start().call(open_arena, name=name)
    done = subprocess.run(
        ["unshare", "-pf", "--mount-proc", sys.executable, "-c", APART, name],
        capture_output=True, text=True, check=False, cwd="/", timeout=120,
    )  # fmt: skip
    if done.stderr.startswith("unshare"):
        pytest.skip(f"this system lets nobody have a pid namespace: {done.stderr.strip()}")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "well"), done.stdout + done.stderr
    assert f"kept {name}" in done.stdout and segment_path(name).exists()


def test_the_dead_publisher_of_another_container(start, name, capsys):
    """Its lock tells when it is dead, whatever children it has forked. Then the name, and its numbers, go on."""
    trainer = start()
    trainer.call(open_arena, 3, name=name)
    child = trainer.call(fork_a_sleeper)
    try:
        forge(name, pid_namespace=0)
        with pytest.raises(shmsync.ArenaExists, match="lives in another container"):
            shmsync.Publisher(stamped(1), name=name)
        assert cli.main(["gc"]) == 0
        assert f"kept {name}: its publisher lives in another container" in capsys.readouterr().out
        trainer.call(begin_update, 4)  # with one slot a half written version counts
        trainer.kill()
        with shmsync.Publisher(stamped(5), name=name) as heir:
            assert heir.version == 5
    finally:
        os.kill(child, 9)
    with shmsync.Publisher(stamped(1), name=name) as pub:  # a closed name
        assert pub.version == 1
