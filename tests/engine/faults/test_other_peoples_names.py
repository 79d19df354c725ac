"""Names in /dev/shm of another user or program, or no segment: refused by each entry, harmed by none."""

import contextlib
import fcntl
import itertools
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shmsync
from shmsync import cli
from shmsync.memory.control import leftovers
from support.faults import squatting
from support.faults.squatting import KINDS, NEED_ROOT, STRANGER
from support.jobs.engine import open_arena
from support.processes import segment_path
from support.weights import stamped

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user; run as root")


def create(name):
    shmsync.Publisher(stamped(1), name=name).close()


def attach(name):
    shmsync.Subscriber(name, timeout=0.1).close()


def sweep(name):
    assert leftovers.sweep(name) is not None


def list_all(name):
    assert cli.main(["list", "-v"]) == 0
    assert cli.main(["list", "--json"]) == 0


def gc(name):
    assert cli.main(["gc", "--dry-run"]) == 0
    assert cli.main(["gc"]) == 0


REFUSE = (create, attach)
HARMLESS = {
    "sweep": sweep,
    "sweep all": lambda name: leftovers.sweep_some(float("inf")),
    "list": list_all,
    "inspect": lambda name: cli.main(["inspect", name, "--interval", "0"]),
    "export": lambda name: cli.main(["export", name, "/nowhere/file"]),
    "gc": gc,
    "doctor": lambda name: cli.main(["doctor"]),
}


def state(path):
    """Everything that a sweeper or a creator could have changed."""
    found = os.lstat(path)
    inside = sorted(os.listdir(path)) if stat.S_ISDIR(found.st_mode) else None
    target = path.with_name(f"target.{path.name}")
    content = path.read_bytes() if stat.S_ISREG(found.st_mode) else None
    return found.st_ino, found.st_mode, found.st_uid, inside, content, target.exists() and target.read_bytes()


@pytest.fixture
def squat(name):
    path = segment_path(name)
    with shmsync.Publisher(stamped(1)) as pub:

        def make(kind):
            kind(path, pub.name)
            return path

        yield make
        squatting.remove(path)


def needing(kinds):
    return [pytest.param(kind, marks=[needs_root] if kind in NEED_ROOT else [], id=kind.__name__) for kind in kinds]


@pytest.mark.parametrize("kind", needing(KINDS))
def test_who_creates_or_attaches_is_refused_and_who_looks_or_sweeps_harms_nothing(squat, name, kind, capsys):
    path = squat(kind)
    before = state(path)
    for entry in REFUSE:
        with pytest.raises((shmsync.ArenaNotFound, shmsync.ArenaExists, shmsync.ArenaCorrupt)) as caught:
            entry(name)
        assert name in str(caught.value), entry.__name__
        assert state(path) == before, entry.__name__
    for what, entry in HARMLESS.items():
        with contextlib.suppress(shmsync.ShmSyncError):
            entry(name)
        said = capsys.readouterr()
        assert "Traceback" not in said.err, what
        assert state(path) == before, what
        assert what not in ("list", "gc") or name in said.out


def named(name):
    """What of this name lies in /dev/shm, where other processes make arenas meanwhile."""
    return {entry for entry in os.listdir("/dev/shm") if name in entry}


def test_dry_run_says_what_gc_does(start, name, capsys):
    """Of a dead arena, of a living one and of every kind of name at once."""
    dead, paths = start(), []
    dead.call(open_arena, name=f"{name}.dead")
    dead.kill()
    with shmsync.Publisher(stamped(1), name=f"{name}.alive") as pub:
        try:
            for kind in KINDS:
                if kind in NEED_ROOT and os.geteuid() != 0:
                    continue
                paths.append(segment_path(f"{name}.{kind.__name__}"))
                kind(paths[-1], pub.name)
            there = named(name)
            assert cli.main(["gc", "--dry-run"]) == 0
            assert named(name) == there
            would = [line for line in capsys.readouterr().out.splitlines() if name in line and ".dead" not in line]
            assert cli.main(["gc"]) == 0
            said = [line for line in capsys.readouterr().out.splitlines() if name in line]
            did = [line for line in said if ".dead" not in line]
            past = [line.replace("would keep", "kept").replace("would remove ", "removed ") for line in would]
            assert [re.split("[:(]", line)[0] for line in did] == [re.split("[:(]", line)[0] for line in past]
            removed = [line for line in said if line not in did]  # [] if another publisher was quicker
            assert removed in ([], [f"removed {name}.dead (its publisher is dead, process {dead.pid})"])
            assert not segment_path(f"{name}.dead").exists()
            assert all(":" in line for line in did if line.startswith("kept"))
        finally:
            for path in paths:
                squatting.remove(path)
            segment_path(f"{name}.dead").unlink(missing_ok=True)


def test_names_that_no_arena_has_are_not_shown(capsys):
    """They could be escape sequences for a terminal, or lines that look like ours."""
    odd = ["\x1b[2J", "a\nremoved b", " ", "é", "..", "-", "x" * 240]
    paths = [segment_path(each) for each in odd]
    try:
        for path in paths:
            path.write_bytes(b"\x01" * 4096)
        list_all("")
        gc("")
        create(f"test-{os.getpid()}-beside")
        shown = capsys.readouterr().out
        assert not set(odd) & {line.partition(" ")[0] for line in shown.splitlines()}
        for each in odd:
            if each not in (" ", "-", ".."):  # these stand in the commands of other tests' arenas
                assert each not in shown
        assert all(path.exists() for path in paths)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("mask", [0, 0o077, 0o777], ids=oct)
def test_segments_are_for_their_user_alone(name, mask):
    before = os.umask(mask)
    try:
        with shmsync.Publisher(stamped(1), name=name):
            found = os.stat(segment_path(name))
            assert (stat.S_IMODE(found.st_mode) & ~0o600, found.st_uid) == (0, os.geteuid())
            with shmsync.Subscriber(name) if mask != 0o777 or os.geteuid() == 0 else shmsync.Publisher(stamped(1)):
                pass
    finally:
        os.umask(before)


STRANGERS_WAYS = """
import os, sys, torch, shmsync
from shmsync import cli
with shmsync.Publisher({"t": torch.ones(1)}) as pub:  # imports what it needs: a stranger may not read where it lies
    shmsync.Subscriber(pub.name).close()
    cli.main(["gc", "--dry-run"]), cli.main(["list"])
os.setgroups([]); os.setgid(12345); os.setuid(12345)
for name, session in zip(sys.argv[1::2], sys.argv[2::2]):
    for how in (name, shmsync.Handle(name, bytes.fromhex(session))):
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
assert cli.main(["gc"]) == 0 and cli.main(["gc", "--dry-run"]) == 0 and cli.main(["list"]) == 0
with shmsync.Publisher({"t": torch.ones(1)}) as pub:
    shmsync.Subscriber(pub.name).close()
print("well")
"""


@needs_root
def test_another_user_is_refused_and_harms_nothing(start, name):
    """Neither an arena whose publisher lives, nor one whose publisher is dead."""
    alive, dead = start(2)
    names = name, f"{name}.dead"
    handles = [trainer.call(open_arena, name=each) for trainer, each in zip((alive, dead), names, strict=True)]
    with open(segment_path(names[1]), "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # so that no other publisher of this user removes it meanwhile
        dead.kill()
        words = [word for handle in handles for word in (handle.name, handle.session.hex())]
        done = subprocess.run(
            [sys.executable, "-c", STRANGERS_WAYS, *words],
            capture_output=True, text=True, check=False, cwd="/", env={**os.environ, "HOME": "/tmp"},
        )  # fmt: skip
    assert (done.returncode, done.stderr.strip().splitlines()[-1:]) == (0, []), done.stderr
    assert "well" in done.stdout
    for each in names:
        assert f"kept {each}: " in done.stdout
        assert segment_path(each).exists()
    segment_path(names[1]).unlink()


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o666], ids=oct)
def test_root_does_not_act_on_what_another_user_says(open_trainer, name, mode):
    """It may look at it, and remove it when its publisher is dead."""
    path = segment_path(name)
    trainer = open_trainer()
    os.chown(path, STRANGER, -1)
    path.chmod(mode)
    with pytest.raises(shmsync.ArenaNotFound, match=f"uid {STRANGER}"):
        attach(name)
    with pytest.raises(shmsync.ArenaExists):
        create(name)
    trainer.kill()
    assert cli.main(["gc"]) == 0
    assert not path.exists()


def test_who_could_have_written_a_segment_is_not_believed(name):
    with shmsync.Publisher(stamped(1), name=name) as pub:
        for mode, how in itertools.product((0o620, 0o602), (name, pub.handle)):
            segment_path(name).chmod(mode)
            with pytest.raises(shmsync.ArenaNotFound, match=f"{mode:04o}"):
                shmsync.Subscriber(how, timeout=0.1)
        segment_path(name).chmod(0o600)
        attach(name)


def test_a_name_that_changes_hands_is_not_followed(name):
    """Between the look and the removal the name came to stand for something else, which stays."""
    with shmsync.Publisher({"t": torch.ones(1)}, name=name) as pub:
        path = segment_path(name)
        aside = path.with_name(f"aside.{name}")
        path.rename(aside)
        path.symlink_to(aside)
        try:
            pub.close()
            assert path.is_symlink() and aside.exists()
        finally:
            path.unlink(missing_ok=True)
            Path(aside).unlink(missing_ok=True)
