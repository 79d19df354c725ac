"""Names in /dev/shm of another user or program, or no segment: refused by each entry, harmed by none."""

import contextlib
import os
import stat

import pytest

import shmsync
from shmsync import cli
from support.calls import in_forked_child
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
        for command in (["list"], ["inspect", name], ["gc", "--dry-run"], ["gc"], ["doctor"]):
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


def become_a_stranger():
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)


def act_as_a_stranger(state, handle):
    """What another user can try; what it is told."""
    with shmsync.Publisher(stamped(1)) as pub:  # imports what it needs: a stranger may not read where it lies
        shmsync.Subscriber(pub.name).close()
        cli.main(["gc", "--dry-run"]), cli.main(["list"])
    become_a_stranger()
    found = []
    for call in (
        lambda: shmsync.Subscriber(handle.name, timeout=0.1),
        lambda: shmsync.Subscriber(handle, timeout=0.1),
        lambda: shmsync.Publisher(stamped(1), name=handle.name),
    ):
        try:
            call()
        except shmsync.ShmSyncError as error:
            found.append((type(error).__name__, str(error)))
    assert cli.main(["gc"]) == 0
    with shmsync.Publisher(stamped(1)) as pub:
        shmsync.Subscriber(pub.name).close()
    return found


@needs_root
def test_another_user_is_refused_and_harms_nothing(start, name):
    trainer, stranger = start(2)
    handle = trainer.call(open_arena, name=name)
    by_name, by_handle, publisher = stranger.call(act_as_a_stranger, handle)
    for kind, said in (by_name, by_handle):
        assert kind == "ArenaNotFound" and f"uid {STRANGER}" in said
    assert publisher[0] == "ArenaExists" and name in publisher[1]
    assert segment_path(name).exists()


def refusal(handle):
    try:
        shmsync.Subscriber(handle)
    except shmsync.ArenaNotFound as error:
        return str(error)


def attach_to_one_that_is_not_dumpable(state):
    """What a forked child is told that attaches to a publisher which has called setuid()."""
    with shmsync.Publisher(stamped(1)) as pub:  # imports what it needs
        shmsync.Subscriber(pub.name).close()
    become_a_stranger()
    with shmsync.Publisher(stamped(1)) as pub:
        return in_forked_child(lambda: refusal(pub.handle))


@needs_root
def test_a_publisher_that_is_not_dumpable_is_named_as_such(start):
    status, said = start().call(attach_to_one_that_is_not_dumpable)
    assert status == 0 and "is not dumpable, as after setuid()" in said and "start the publisher without" in said


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
