"""Killed publishers leave their control segments. The next publisher removes those of made-up names."""

import os
import shutil
import time

import pytest

import shmsync
from shmsync import _native
from shmsync.engine.write.writer import Writer
from shmsync.memory import leftovers
from support.calls import in_forked_child
from support.jobs.engine import open_arena
from support.processes import descriptors, segment_path, until
from support.weights import stamped


def create_and_stall(state, name, slots=1):
    """A publisher in the middle of its first copy."""
    Writer.publish = lambda self, *given, **named: time.sleep(10**6)
    shmsync.Publisher(stamped(1), name=name, slots=slots)


MAGIC, ABI, OWNER, BOOT_ID, NAMESPACE = 0, 8, 40, 48, 64  # where they stand in a segment
NOBODY = 4_194_303 << 42  # an owner word whose pid no process has


@pytest.fixture
def dead(open_trainer, name):
    """The segment of a publisher that was killed, at a name that only its own test knows."""
    writer = open_trainer()
    aside = segment_path(name).with_name(f"aside.{name}")
    shutil.copyfile(segment_path(name), aside)
    writer.kill()
    yield aside
    aside.unlink(missing_ok=True)


def write(path, offset, data):
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, offset)


def swept(path, name=None):
    """Is it removed, as leftovers are, when it is put in its place?"""
    placed = segment_path(name or leftovers.new_name())
    shutil.copy2(path, placed)
    os.chown(placed, path.stat().st_uid, -1)
    try:
        leftovers.sweep_some(float("inf"))
        return not placed.exists()
    finally:
        placed.unlink(missing_ok=True)


def test_what_is_proven_dead_is_swept(dead, name):
    assert swept(dead)
    assert not swept(dead, name)  # its next publisher continues its numbers


@pytest.mark.parametrize(
    ("offset", "data"), [(NAMESPACE, bytes(8)), (BOOT_ID, bytes(16))], ids=["another pid namespace", "another boot"]
)
def test_no_process_elsewhere_holds_its_lock(dead, offset, data):
    write(dead, offset, data)
    assert swept(dead)


def test_what_is_no_arena_is_left_alone(dead):
    write(dead, MAGIC, b"whatever")
    assert not swept(dead)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_another_users_is_left_alone(dead):
    os.chown(dead, 12345, -1)
    assert not swept(dead)


def test_another_versions_is_swept_when_nobody_has_its_pid(dead):
    write(dead, ABI, (_native.ABI + 1).to_bytes(4, "little"))
    write(dead, OWNER, NOBODY.to_bytes(8, "little"))
    assert swept(dead)


def test_a_publisher_that_dies_in_its_first_copy_leaves_the_name_as_it_was(start, name):
    first, second = start(2)
    first.call(open_arena, 3, name=name)
    first.kill()
    second.start(create_and_stall, name)
    until(lambda: any(name in file for file in descriptors(second.pid).values()))
    second.kill()
    with shmsync.Publisher(stamped(9), name=name) as pub:
        assert pub.version == 4


def test_the_arena_of_a_parent_is_left_alone():
    with shmsync.Publisher(stamped(1)) as pub:
        assert in_forked_child(lambda: leftovers.sweep_some(float("inf"))) == (0, None)
        assert segment_path(pub.name).exists()
