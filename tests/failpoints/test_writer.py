"""A publisher that is killed or stands still between two steps: what readers see then, in each consistency."""

from __future__ import annotations

from itertools import product
from math import inf as for_ever

import pytest

import shmsync
from shmsync.memory import leftovers
from support.calls import outcome
from support.faults.failpoints import SLOTS, half_written, in_place
from support.jobs.engine import attach, close_publisher, enter, open_arena, publish, read
from support.processes import segment_path, segments
from support.weights import stamped, stamps

SHORT = 0.2  # seconds

# In the order in which a publish passes them, and (passages before: the first copy is one leaf, then the second).
GATED, ODD, NUMBERED, PUBLISHED = "begin.gated", ("begin.marked", "commit.start"), "commit.numbered", "commit.current"
STEPS = [GATED, *ODD, NUMBERED, PUBLISHED, "commit.announced"]


def seen(sub, consistency, timeout):
    """What a section shows, or the error: "WriterBusy", (version, torn) or ... A live one may show torn weights."""
    try:
        with sub.read(timeout=timeout) as section:
            version, words = section.version, stamps(section.weights)
    except shmsync.ShmSyncError as error:
        return type(error).__name__
    if consistency != "live" and not section.torn:
        assert words == (version, version)
    return version if not section.torn else "torn"


def expected(point, slots, consistency, killed):
    """Of a section that is entered while the publisher of version 2 is held at this point."""
    if point in (PUBLISHED, "commit.announced"):
        return 2
    if slots > 1 or (point == GATED and (consistency != "pinned" or killed)):
        return 1
    if consistency == "live":  # says itself that its weights were written
        return 1 if point == GATED else "torn"
    if not killed:
        return "WriterBusy"
    return 2 if point == NUMBERED else "Poisoned"


def swept(name, old):
    """The next publisher of this name finds it free, and leaves nothing."""
    with shmsync.Publisher(stamped(9), name=name) as pub, shmsync.Subscriber(pub.handle) as sub:
        assert pub.handle.session != old.session
        version, *values = read(sub)
        assert values == [9, 9]
        assert 1 <= version <= 4  # of a killed one the numbers go on, also after a version that was half written
    assert not segment_path(name).exists()


HOW = publish, in_place
# With several slots there is no gate; in place, the trainer writes by itself.
PUBLISHING = [*product([GATED], HOW, [1]), *product(STEPS[1:], HOW, SLOTS)]
PUBLISHING += product(["copy.leaf"], [publish], SLOTS)


@pytest.mark.parametrize(("point", "how", "slots"), PUBLISHING)
def test_a_publish(start, name, hold, point, how, slots, consistency):
    writer = start()
    handle = writer.call(open_arena, name=name, slots=slots)
    with shmsync.Subscriber(handle, consistency=consistency) as sub:
        assert sub.refresh() is False
        held = hold(writer, point, nth=2 if point == "copy.leaf" else 1).run(how, 2)
        like = "commit.start" if point == "copy.leaf" else point
        timeout = for_ever if held.killed else SHORT
        want = expected(like, slots, consistency, held.killed)
        assert seen(sub, consistency, timeout) == want
        assert sub.publisher_alive is not held.killed
        if held.killed:
            assert seen(sub, consistency, for_ever) == want
            with pytest.raises(shmsync.WriterDied):
                sub.wait_version(3, timeout=for_ever)
            swept(name, handle)
            assert seen(sub, consistency, for_ever) == want  # subscribers do not switch
            return
        if like not in (PUBLISHED, "commit.announced"):
            with pytest.raises(shmsync.PublishTimeout):
                sub.wait_version(2, timeout=SHORT)
        with pytest.raises(shmsync.ArenaExists, match=str(writer.pid)):
            shmsync.Publisher(stamped(1), name=name)
        assert held.result() == 2
        assert sub.wait_version(2) == 2
        assert seen(sub, consistency, for_ever) == 2
        assert writer.call(publish, 3) == 3
        assert seen(sub, consistency, for_ever) == 3


FAILS = [("poison.state", 1), ("abort.start", 2), ("abort.numbered", 2), ("abort.start", 3)]


@pytest.mark.parametrize(("point", "slots"), FAILS)
def test_an_update_that_fails(start, name, hold, point, slots, consistency):
    """One slot: poisoned, by whoever dies then too. Several: the old version is there all the time."""
    writer = start()
    handle = writer.call(open_arena, name=name, slots=slots)
    with shmsync.Subscriber(handle, consistency=consistency) as sub:
        held = hold(writer, point).run(half_written, 2)
        want = 1 if slots > 1 else "torn" if consistency == "live" else "Poisoned"
        # A live publisher may yet repair it, and readers wait for that until their deadline.
        assert seen(sub, consistency, for_ever if held.killed else SHORT) == want
        if held.killed:
            with pytest.raises(shmsync.WriterDied):
                sub.wait_version(2, timeout=for_ever)
            swept(name, handle)
            return
        with pytest.raises(KeyError):
            held.result()
        assert writer.call(publish, 2) == 2
        assert seen(sub, consistency, for_ever) == 2


# With several slots there is no gate to open.
NO_ROOM = [("abort.opened", 1), *product(["abort.start", "writer.waits"], SLOTS)]


@pytest.mark.parametrize(("point", "slots"), NO_ROOM)
def test_a_publish_that_finds_no_room(start, name, hold, point, consistency, slots):
    """It gives the gate back: nothing was written. Its readers keep their version at each step of that."""
    writer = start()
    handle = writer.call(open_arena, name=name, slots=slots)
    subs = [shmsync.Subscriber(handle, worker=index) for index in range(slots)]
    sections = []
    try:
        for version, sub in enumerate(subs, 1):  # every slot is pinned
            if version > 1:
                writer.call(publish, version)
            sections.append(sub.read().__enter__())
        with shmsync.Subscriber(handle, consistency=consistency) as other:
            held = hold(writer, point).run(publish, slots + 1, timeout=SHORT)
            found = seen(other, consistency, for_ever if held.killed else SHORT)
            closed = slots == 1 and consistency == "pinned" and point != "abort.opened" and not held.killed
            assert found == ("WriterBusy" if closed else slots)
            for version, section in enumerate(sections, 1):
                assert (section.version, *stamps(section.weights)) == (version,) * 3
            if not held.killed:
                with pytest.raises(shmsync.ReaderStalled) as caught:
                    held.result()
                assert set(caught.value.missing) <= set(range(slots)) and caught.value.missing
                assert seen(other, consistency, for_ever) == slots
    finally:
        for section in sections:
            section.__exit__(None, None, None)
        for sub in subs:
            sub.close()


@pytest.mark.parametrize("point", ["close.state", "withdraw.before", "withdraw.after"])
def test_a_close(start, name, hold, point, slots, consistency):
    writer = start()
    handle = writer.call(open_arena, 2, name=name, slots=slots)
    with shmsync.Subscriber(handle, consistency=consistency) as sub:
        held = hold(writer, point).run(close_publisher)
        assert seen(sub, consistency, for_ever) == 2
        assert sub.refresh() is False
        with pytest.raises((shmsync.ClosedError, shmsync.WriterDied)):
            sub.wait_version(3, timeout=for_ever)
        if not held.killed:
            held.result()
        swept(name, handle)


CREATION = ["slab.created", "create.mapped", "create.written", "segment.locked", "ready.before", "ready.after"]
CREATION += ["segment.nameless", "segment.named"]


@pytest.mark.parametrize("point", CREATION)
def test_a_creation(start, name, hold, point, slots, consistency):
    """No process finds an arena that is half made, and one that is killed in the middle leaves nothing."""
    writer = start()
    held = hold(writer, point).run(open_arena, name=name, slots=slots)
    named = point == "segment.named"
    if held.killed:
        with pytest.raises(shmsync.WriterDied if named else shmsync.ArenaNotFound):
            shmsync.Subscriber(name, timeout=SHORT)
        with shmsync.Publisher(stamped(9), name=name) as pub:
            assert pub.version == (2 if named else 1)
        assert not segment_path(name).exists() and not segments(writer.pid)
        return
    if named:
        with shmsync.Subscriber(name, consistency=consistency) as early:
            assert early.latest == 1
        with pytest.raises(shmsync.ArenaExists):
            shmsync.Publisher(stamped(9), name=name)
    else:
        assert outcome(shmsync.Subscriber, name, timeout=SHORT) == "ArenaNotFound"
    handle = held.result()
    with shmsync.Subscriber(handle, consistency=consistency) as sub:
        assert seen(sub, consistency, for_ever) == 1


@pytest.mark.parametrize("point", ["slab.created", "segment.nameless"])
@pytest.mark.parametrize("action", ["pause"])
def test_the_first_that_is_ready_has_the_name(start, name, hold, point):
    held = hold(start(), point).run(open_arena, name=name)
    with shmsync.Publisher(stamped(9), name=name) as pub:
        with pytest.raises(shmsync.ArenaExists):
            held.result()
        with shmsync.Subscriber(pub.handle) as sub:
            assert read(sub) == (1, 9, 9)


@pytest.mark.parametrize("point", CREATION)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("action", ["kill"])
def test_numbers_go_on_where_a_creation_under_a_dead_name_is_killed(start, name, hold, point, slots):
    first, second = start(2)
    first.call(open_arena, 3, name=name, slots=slots)
    first.kill()
    hold(second, point).run(open_arena, name=name, slots=slots, first_version=None)
    with shmsync.Publisher(stamped(9), name=name, slots=slots) as pub:
        assert pub.version == 4
    leftovers.sweep_some(for_ever)
    assert not segment_path(name).exists() and not segments(second.pid)


@pytest.mark.parametrize("point", ["reap.owner", "release.pin"])
def test_the_reaping_of_a_dead_reader(start, name, hold, point, slots, consistency):
    writer, *readers = start(max(2, slots))
    handle = writer.call(open_arena, name=name, slots=slots, max_readers=len(readers) + 1)
    for version, reader in enumerate(readers, 1):  # each slot but one is pinned by a dead reader
        reader.call(attach, handle, worker=version)
        reader.call(enter)
        if slots > 1:
            writer.call(publish, version + 1)
    for reader in readers:
        reader.kill()
    with shmsync.Subscriber(handle, consistency=consistency) as sub:
        held = hold(writer, point).run(publish, slots + 1)
        timeout = for_ever if held.killed else SHORT
        closed = slots == 1 and consistency == "pinned" and not held.killed
        assert seen(sub, consistency, timeout) == ("WriterBusy" if closed else slots)
        if held.killed:
            swept(name, handle)
            return
        assert held.result() == slots + 1
        assert seen(sub, consistency, for_ever) == slots + 1
        with shmsync.Subscriber(handle) as joined:  # the row is free
            assert read(joined) == (slots + 1,) * 3


@pytest.mark.parametrize("point", ["writer.waits"])
def test_a_wait_for_acks(start, name, hold, point, slots, consistency):
    """The version is published, whatever becomes of the wait."""
    writer = start()
    handle = writer.call(open_arena, name=name, slots=slots)
    with shmsync.Subscriber(handle, consistency=consistency, worker=0) as sub:
        held = hold(writer, point).run(publish, 2, wait=[0])
        assert seen(sub, consistency, for_ever) == 2
        if held.killed:
            swept(name, handle)
        else:
            assert held.result() == 2
