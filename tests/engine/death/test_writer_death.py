"""A writer that is killed: readers keep what is whole, and are told. Section 6 of the design, with real signals."""

import os
import re
from math import inf as for_ever
from pathlib import Path

import pytest

import shmsync
from shmsync import cli
from support.jobs.engine import (
    GONE,
    attach,
    begin_update,
    detach,
    look,
    open_arena,
    publish,
    read,
    wait_version,
)
from support.processes import segment_path, slab_inodes
from support.weights import stamped, stamps


def holders(inode):
    """Processes that map this memfd, or have it open."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            maps = Path(f"/proc/{entry}/maps").read_text()
            if re.search(rf" {inode} +/memfd:shmsync", maps) or inode in slab_inodes(entry):
                found.add(int(entry))
        except (OSError, ValueError):
            pass
    return found


@pytest.mark.parametrize(("slots", "moment"), [(1, "idle"), (2, "idle"), (2, "inside update")])
def test_readers_keep_the_last_version_of_a_killed_writer(open_trainer, slots, moment):
    writer = open_trainer(2, slots=slots)
    with (
        shmsync.Subscriber(writer.handle) as sub,
        shmsync.Subscriber(writer.handle, consistency="optimistic") as optimistic,
    ):
        writer.call(publish, 3)
        if moment == "inside update":
            writer.call(begin_update, 4)
        writer.kill()
        assert read(sub) == read(optimistic) == (3, 3, 3)
        assert sub.refresh() is False
        assert sub.wait_version(3) == 3
        assert stamps(sub.snapshot().weights) == (3, 3)
        for reader in (sub, optimistic):
            with pytest.raises(shmsync.WriterDied, match=str(writer.pid)):
                reader.wait_version(4, timeout=for_ever)
            with pytest.raises(shmsync.WriterDied):
                reader.read(version=4, timeout=for_ever).__enter__()
        assert read(sub) == (3, 3, 3)
        with pytest.raises(GONE):
            shmsync.Subscriber(writer.handle)


def test_death_of_the_writer_wakes_a_waiting_reader(start, name):
    writer, reader = start(2)
    reader.call(attach, writer.call(open_arena, name=name, slots=2))
    reader.start(wait_version, 2, timeout=for_ever)
    writer.kill()
    with pytest.raises(shmsync.WriterDied):
        reader.result()


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
def test_weights_half_written_by_a_killed_writer_are_never_served(open_trainer, consistency):
    writer = open_trainer(3)
    with shmsync.Subscriber(writer.handle, consistency=consistency) as sub:
        writer.call(begin_update, 4)
        writer.kill()
        for call in (lambda: read(sub, timeout=for_ever), lambda: sub.run(print), sub.snapshot):
            with pytest.raises(shmsync.Poisoned) as caught:
                call()
            assert caught.value.version == 4
        assert sub.version == 3
        with pytest.raises(shmsync.WriterDied):
            sub.wait_version(4, timeout=for_ever)
    with pytest.raises(GONE):
        shmsync.Subscriber(writer.handle)


def test_section_that_was_open_when_the_writer_died_half_way_is_torn(open_trainer):
    writer = open_trainer(3)
    with shmsync.Subscriber(writer.handle, consistency="optimistic") as sub:
        with sub.read() as section:
            writer.call(begin_update, 4)
            writer.kill()
        assert section.torn
        with pytest.raises(shmsync.Poisoned):
            sub.run(print)


@pytest.mark.host_memory(reason="it follows the slab's file; the memory of a device is its driver's to free")
def test_killed_publisher_leaves_no_memory(start, name, capsys):
    writer, reader = start(2)
    reader.call(attach, writer.call(open_arena, name=name))
    (inode,) = slab_inodes(writer.pid)
    assert holders(inode) == {writer.pid, reader.pid}
    writer.kill()
    assert holders(inode) == {reader.pid}
    assert reader.call(look) == (1, 1, 1)
    reader.call(detach)
    assert holders(inode) == set()
    with shmsync.Publisher(stamped(1)) as alive:
        assert cli.main(["gc"]) == 0  # unless that publisher has removed it
        assert segment_path(alive.name).exists()
        assert f"kept {alive.name}: it belongs to a Publisher of this process" in capsys.readouterr().out
    assert not segment_path(name).exists()


def test_restarted_publisher_is_another_session(open_trainer, name):
    writer = open_trainer(3)
    with shmsync.Subscriber(name) as sub:
        writer.stop()
        assert sub.publisher_alive  # it may go on
        writer.kill()
        assert not sub.publisher_alive
        with shmsync.Publisher(stamped(9), name=name) as pub:
            assert pub.version == 4
            for v in range(5, 7):
                pub.publish(stamped(v))
            assert pub.handle != writer.handle
            with pytest.raises(shmsync.ArenaNotFound):
                shmsync.Subscriber(writer.handle)
            # The old subscriber stays with the weights that it has.
            assert sub.refresh() is False
            assert read(sub) == (3, 3, 3)
            assert (sub.version, sub.latest, sub.publisher_alive) == (3, 3, False)
            with pytest.raises(shmsync.WriterDied):
                sub.wait_version(4, timeout=for_ever)
            with shmsync.Subscriber(name) as new:
                assert read(new) == (6, 6, 6)
    with pytest.raises(shmsync.ClosedError):
        sub.publisher_alive  # noqa: B018
