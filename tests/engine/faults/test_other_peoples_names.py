"""Names in /dev/shm of another user or program, or no segment: refused by each entry, harmed by none."""

import contextlib
import os
import stat
import subprocess
import sys

import pytest

import shmsync
from shmsync import cli
from support.jobs.engine import open_arena
from support.processes import segment_path
from support.weights import stamped

STRANGER = 12345  # a uid that no user has
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user; run as root")


def link_to_a_file(path):
    """A file of the user's that a sweeper, or a creator, would harm."""
    target = path.with_name(f"target.{path.name}")
    target.write_bytes(b"precious")
    path.symlink_to(target)


def full_folder(path):
    path.mkdir()
    (path / "file").write_bytes(b"precious")


def text_file(path):
    path.write_text("# notes of somebody who likes this name\n" * 100)
    path.chmod(0o600)


KINDS = {"link": link_to_a_file, "folder": full_folder, "fifo": os.mkfifo, "file": text_file}


def state(path):
    """Everything that a sweeper or a creator could have changed."""
    found = os.lstat(path)
    inside = sorted(os.listdir(path)) if stat.S_ISDIR(found.st_mode) else None
    content = path.read_bytes() if stat.S_ISREG(found.st_mode) or path.is_symlink() else None
    return found.st_ino, found.st_mode, inside, content


@pytest.mark.parametrize("kind", KINDS)
def test_who_creates_or_attaches_is_refused_and_who_looks_or_sweeps_harms_nothing(name, kind, capsys):
    path = segment_path(name)
    KINDS[kind](path)
    try:
        before = state(path)
        with pytest.raises((shmsync.ArenaExists, shmsync.ArenaCorrupt), match=name):
            shmsync.Publisher(stamped(1), name=name)
        with pytest.raises((shmsync.ArenaNotFound, shmsync.ArenaCorrupt), match=name):
            shmsync.Subscriber(name, timeout=0.1)
        for command in (["list"], ["inspect", name, "--interval", "0"], ["gc", "--dry-run"], ["gc"], ["doctor"]):
            with contextlib.suppress(shmsync.ShmSyncError):
                cli.main(command)
            assert "Traceback" not in capsys.readouterr().err
        assert state(path) == before
    finally:
        target = path.with_name(f"target.{path.name}")
        target.unlink(missing_ok=True)
        if path.is_dir():
            (path / "file").unlink()
            path.rmdir()


@pytest.mark.parametrize("mask", [0, 0o077], ids=oct)
def test_segments_are_for_their_user_alone(name, mask):
    before = os.umask(mask)
    try:
        with shmsync.Publisher(stamped(1), name=name):
            found = os.stat(segment_path(name))
            assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.geteuid())
    finally:
        os.umask(before)


STRANGERS_WAYS = """
import os, sys, torch, shmsync
from shmsync import cli
with shmsync.Publisher({"t": torch.ones(1)}) as pub:  # imports what it needs: a stranger may not read where it lies
    shmsync.Subscriber(pub.name).close()
    cli.main(["gc", "--dry-run"]), cli.main(["list"])
os.setgroups([]); os.setgid(12345); os.setuid(12345)
name = sys.argv[1]
for how in (name, shmsync.Handle(name, bytes.fromhex(sys.argv[2]))):
    try:
        shmsync.Subscriber(how, timeout=0.1)
        sys.exit("a stranger is let in")
    except shmsync.ArenaNotFound as error:
        assert "uid 12345" in str(error), error
try:
    shmsync.Publisher({"t": torch.ones(1)}, name=name)
    sys.exit("a stranger has the name")
except shmsync.ArenaExists as error:
    assert name in str(error)
assert cli.main(["gc"]) == 0
with shmsync.Publisher({"t": torch.ones(1)}) as pub:
    shmsync.Subscriber(pub.name).close()
print("well")
"""


@needs_root
def test_another_user_is_refused_and_harms_nothing(start, name):
    handle = start().call(open_arena, name=name)
    done = subprocess.run(
        [sys.executable, "-c", STRANGERS_WAYS, handle.name, handle.session.hex()],
        capture_output=True, text=True, check=False, cwd="/", env={**os.environ, "HOME": "/tmp"},
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip().splitlines()[-1:]) == (0, []), done.stderr
    assert "well" in done.stdout
    assert segment_path(name).exists()


UNDUMPABLE = """
import os, torch, shmsync
with shmsync.Publisher({"t": torch.ones(1)}) as pub:  # imports what it needs
    shmsync.Subscriber(pub.name).close()
os.setgroups([]); os.setgid(12345); os.setuid(12345)
with shmsync.Publisher({"t": torch.ones(1)}) as pub:
    child = os.fork()
    if child == 0:
        try:
            shmsync.Subscriber(pub.handle)
        except shmsync.ArenaNotFound as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@needs_root
def test_a_publisher_that_is_not_dumpable_is_named_as_such():
    done = subprocess.run(
        [sys.executable, "-c", UNDUMPABLE], capture_output=True, text=True, check=True, cwd="/",
        env={**os.environ, "HOME": "/tmp"},
    )  # fmt: skip
    assert "is not dumpable, as after setuid()" in done.stdout and "start the publisher without" in done.stdout


@needs_root
def test_root_does_not_act_on_what_another_user_says(open_trainer, name):
    """It may look at it, and remove it when its publisher is dead."""
    path = segment_path(name)
    trainer = open_trainer()
    os.chown(path, STRANGER, -1)
    with pytest.raises(shmsync.ArenaNotFound, match=f"uid {STRANGER}"):
        shmsync.Subscriber(name, timeout=0.1)
    with pytest.raises(shmsync.ArenaExists):
        shmsync.Publisher(stamped(1), name=name)
    trainer.kill()
    assert cli.main(["gc"]) == 0
    assert not path.exists()
