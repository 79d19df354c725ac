"""Section 6 of the design, row by row, with real signals."""

import gc
import math
import os
import secrets
import signal
import struct

import pytest
import torch
from support.calls import Call, in_forked_child, outcome
from support.engine import (
    apply_until,
    attach,
    begin_update,
    create_and_stall,
    detach,
    enter,
    leave,
    look,
    open_arena,
    publish,
    read_for_ever,
    refresh,
    wait_version,
)
from support.holdings import holders, slab_inodes
from support.processes import segment_path, until
from support.reader_table import ACKED, OWNER, PIN, rows_offset, word, write_row
from support.weights import Net, bytes_of, stamp, stamped, stamps

import shmsync
from shmsync import _native, cli
from shmsync.engine.acks import wait_for_acks

for_ever = math.inf


def read(sub, **kwargs):
    """(version, smallest, largest word) of one section."""
    with sub.read(**kwargs) as section:
        return (section.version, *stamps(section.weights))


# ---- the writer dies


@pytest.mark.parametrize("moment", ["idle", "inside update"])
def test_readers_keep_the_last_version_of_a_killed_writer(start, name, moment):
    writer = start()
    handle = writer.call(open_arena, 2, name=name, slots=2)
    with (
        shmsync.Subscriber(handle) as sub,
        shmsync.Subscriber(handle, consistency="optimistic") as optimistic,
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
        with pytest.raises(shmsync.WriterDied):
            shmsync.Subscriber(handle)


def test_death_of_the_writer_wakes_a_waiting_reader(start, name):
    writer, reader = start(2)
    reader.call(attach, writer.call(open_arena, name=name, slots=2))
    reader.start(wait_version, 2, timeout=for_ever)
    writer.kill()
    with pytest.raises(shmsync.WriterDied):
        reader.result()


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
def test_intact_weights_of_a_killed_writer_are_served_in_place(start, name, consistency):
    writer = start()
    with shmsync.Subscriber(writer.call(open_arena, 3, name=name), consistency=consistency) as sub:
        writer.call(publish, 4)
        writer.kill()
        assert read(sub) == (4, 4, 4)
        with pytest.raises(shmsync.WriterDied):
            sub.wait_version(5, timeout=for_ever)


def test_intact_weights_are_served_when_the_writer_died_waiting_for_pins(start, name):
    writer = start()
    handle = writer.call(open_arena, 3, name=name)
    with shmsync.Subscriber(handle) as holder, shmsync.Subscriber(handle) as late:
        with holder.read() as section:
            writer.start(publish, 4, timeout=for_ever)
            until(lambda: outcome(read, late, timeout=0) == "WriterBusy")
            writer.kill()
            assert (section.version, *stamps(section.weights)) == (3, 3, 3)
            assert read(late) == (3, 3, 3)
        assert read(holder) == (3, 3, 3)
        with pytest.raises(shmsync.WriterDied):
            late.wait_version(4, timeout=for_ever)


def test_intact_weights_are_served_when_the_writer_died_before_it_opened_the_gate(start, name):
    writer = start()
    with shmsync.Subscriber(writer.call(open_arena, 3, name=name)) as sub:
        writer.call(publish, 4)
        writer.kill()
        # As it was for an instant: bytes and seq are of version 4, `current` says 3 with the gate closed.
        with open(segment_path(name), "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), word(3 << 8 | 1 << 7), 256)
        assert read(sub) == (4, 4, 4)
        assert sub.wait_version(4) == 4


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
def test_weights_half_written_by_a_killed_writer_are_never_served(start, name, consistency):
    writer = start()
    handle = writer.call(open_arena, 3, name=name)
    with shmsync.Subscriber(handle, consistency=consistency) as sub:
        writer.call(begin_update, 4)
        writer.kill()
        for call in (lambda: read(sub, timeout=for_ever), lambda: sub.run(print), sub.snapshot):
            with pytest.raises(shmsync.Poisoned) as caught:
                call()
            assert caught.value.version == 4
        assert sub.version == 3
        with pytest.raises(shmsync.WriterDied):
            sub.wait_version(4, timeout=for_ever)
    with pytest.raises(shmsync.WriterDied):
        shmsync.Subscriber(handle)


def test_section_that_was_open_when_the_writer_died_half_way_is_torn(start, name):
    writer = start()
    with shmsync.Subscriber(writer.call(open_arena, 3, name=name), consistency="optimistic") as sub:
        with sub.read() as section:
            writer.call(begin_update, 4)
            writer.kill()
        assert section.torn
        with pytest.raises(shmsync.Poisoned):
            sub.run(print)


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
    # What is left is the small segment, until somebody sweeps it.
    assert segment_path(name).stat().st_size < 1 << 20
    with shmsync.Publisher(stamped(1)) as alive:
        assert cli.main(["gc"]) == 0
        assert segment_path(alive.name).exists()
        said = capsys.readouterr().out
        assert f"removed {name}\n" in said
        assert f"kept {alive.name}: process {os.getpid()} is alive" in said
    assert not segment_path(name).exists()


def test_next_publisher_of_the_name_sweeps_a_dead_one(start, name):
    writer = start()
    writer.call(open_arena, name=name)
    with pytest.raises(shmsync.ArenaExists, match=str(writer.pid)):
        shmsync.Publisher(stamped(1), name=name)
    before = segment_path(name).stat().st_ino
    writer.kill()
    with shmsync.Publisher(stamped(1), name=name) as pub:
        assert segment_path(name).stat().st_ino != before
        with shmsync.Subscriber(name) as sub:
            pub.publish(stamped(2))
            assert read(sub) == (2, 2, 2)
    assert not segment_path(name).exists()


@pytest.mark.parametrize("slots", [1, 2])
def test_restarted_publisher_is_another_session(start, name, slots):
    writer = start()
    handle = writer.call(open_arena, 3, name=name, slots=slots)
    with shmsync.Subscriber(handle) as sub:
        writer.kill()
        with shmsync.Publisher(stamped(9), name=name, slots=slots) as pub:
            for v in range(2, 6):
                pub.publish(stamped(v))
            assert pub.handle != handle
            with pytest.raises(shmsync.ArenaNotFound):
                shmsync.Subscriber(handle)
            # The old subscriber stays with the weights that it has.
            assert sub.refresh() is False
            assert read(sub) == (3, 3, 3)
            assert (sub.version, sub.latest) == (3, 3)
            with pytest.raises(shmsync.WriterDied):
                sub.wait_version(4, timeout=for_ever)
            with shmsync.Subscriber(name) as new:
                assert read(new) == (5, 5, 5)


# ---- a reader dies


@pytest.mark.parametrize("slots", [1, 2])
def test_publisher_never_waits_for_a_killed_reader(start, slots):
    reader = start()
    with shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub:
        reader.call(attach, pub.handle, worker=5)
        reader.call(enter)
        reader.kill()
        for v in range(2, 6):
            assert pub.publish(stamped(v)) == v
        assert pub.readers() == []
        assert pub.stats().reaped == 1
        with shmsync.Subscriber(pub.handle) as sub:
            assert read(sub) == (5, 5, 5)


@pytest.mark.parametrize("slots", [1, 2])
def test_death_of_a_reader_is_noticed_by_a_waiting_publisher(start, slots):
    reader = start()
    with shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub:
        reader.call(attach, pub.handle, worker=5)
        reader.call(enter)
        for v in range(2, slots + 1):
            pub.publish(stamped(v))
        call = Call(pub.publish, stamped(slots + 1))
        until(lambda: pub._side.lock.locked())
        call.join(0.2)
        assert call.is_alive()
        reader.kill()
        assert call.result() == slots + 1


@pytest.mark.parametrize("slots", [1, 2])
def test_readers_killed_at_any_moment_hold_nobody_up(start, slots):
    victims = start(4)
    with (
        shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub,
        shmsync.Subscriber(pub.handle, timeout=for_ever) as witness,
    ):
        version = 1
        for victim in victims:
            victim.call(attach, pub.handle)
            victim.start(read_for_ever)
        for victim in victims:
            for _ in range(50):
                version += 1
                assert pub.publish(stamped(version)) == version
            victim.kill()
        for _ in range(5):
            version += 1
            pub.publish(stamped(version))
            assert read(witness) == (version,) * 3
        for victim in victims:
            assert victim.process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("slots", [1, 2])
def test_joiner_takes_over_the_row_of_a_killed_reader(start, slots):
    first, second, third = start(3)
    with shmsync.Publisher(stamped(1), slots=slots, max_readers=2, timeout=for_ever) as pub:
        first.call(attach, pub.handle, worker=1)
        second.call(attach, pub.handle, worker=2)
        with pytest.raises(shmsync.ReaderTableFull):
            third.call(attach, pub.handle, worker=3)
        first.call(enter)
        first.kill()
        third.call(attach, pub.handle, worker=3)
        assert sorted(reader.worker for reader in pub.readers()) == [2, 3]
        assert all(reader.pinned is None for reader in pub.readers())
        for v in range(2, 5):
            pub.publish(stamped(v))
        assert second.call(look) == third.call(look) == (4, 4, 4)


def test_publish_names_the_worker_that_was_killed_before_it_applied(start):
    alive, victim = start(2)
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        alive.call(attach, pub.handle, worker=1)
        victim.call(attach, pub.handle, worker=2)
        for wait in ("all", [1, 2]):
            version = pub.version + 1
            alive.start(apply_until, version)
            call = Call(pub.publish, stamped(version), wait=wait)
            assert alive.result() == version
            assert call.is_alive()
            victim.kill()
            with pytest.raises(shmsync.WorkerDied, match="worker 2") as caught:
                call.result()
            assert caught.value.missing == [2]
            assert caught.value.version == pub.version == version
            victim = start()
            victim.call(attach, pub.handle, worker=2)


def test_dead_worker_is_reported_once(start):
    alive, victim = start(2)
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        alive.call(attach, pub.handle, worker=1)
        victim.call(attach, pub.handle, worker=2)
        alive.start(apply_until, 2)
        call = Call(pub.publish, stamped(2), wait="all")
        until(lambda: pub.version == 2)
        victim.kill()
        with pytest.raises(shmsync.WorkerDied):
            call.result()
        alive.result()
        # "all" means the rows alive at commit.
        alive.start(apply_until, 3)
        assert pub.publish(stamped(3), wait="all") == 3
        alive.result()
        # Asked for by name it is missing as long as nobody takes its index over.
        alive.start(apply_until, 4)
        with pytest.raises((shmsync.WorkerDied, shmsync.AckTimeout)) as caught:
            pub.publish(stamped(4), wait=[1, 2], timeout=1)
        assert caught.value.missing == [2]
        alive.result()


def test_restarted_worker_stands_in_for_the_dead_one_of_its_index(start):
    alive, victim = start(2)
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        alive.call(attach, pub.handle, worker=1)
        victim.call(attach, pub.handle, worker=2)
        victim.kill()
        heir = start()
        heir.call(attach, pub.handle, worker=2)
        for version, wait in ((2, [1, 2]), (3, "all")):
            alive.start(apply_until, version)
            heir.start(apply_until, version)
            assert pub.publish(stamped(version), wait=wait) == version
            assert alive.result() == heir.result() == version


def test_named_worker_may_attach_after_the_publish(start):
    late = start()
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        call = Call(pub.publish, stamped(2), wait=[4])
        until(lambda: pub.version == 2)
        assert late.call(attach, pub.handle, worker=4) == 2
        assert call.result() == 2


def test_named_worker_that_acked_and_left_at_once_has_applied(start):
    """However late the publisher looks."""
    worker = start()
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        worker.call(attach, pub.handle, worker=4)
        worker.call(detach)
        worker.call(attach, pub.handle, worker=4)
        version = pub.publish(stamped(2))
        assert worker.call(look) == (2, 2, 2)
        worker.call(detach)
        side = pub._side
        wait_for_acks(side.writer, pub._arena.control, side.peers, version, [4], for_ever, side._me, {})


def test_named_worker_that_left_without_an_ack_is_late(start):
    leaver = start()
    with shmsync.Publisher(stamped(1)) as pub:
        leaver.call(attach, pub.handle, worker=4)
        call = Call(pub.publish, stamped(2), wait=[4], timeout=1)
        until(lambda: pub.version == 2)
        leaver.call(detach)
        with pytest.raises(shmsync.AckTimeout) as caught:
            call.result()
        assert caught.value.missing == [4]


def test_clean_leaver_is_not_waited_for(start):
    leaver = start()
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        leaver.call(attach, pub.handle, worker=4)
        call = Call(pub.publish, stamped(2), wait="all")
        until(lambda: pub.version == 2)
        leaver.call(detach)
        assert call.result() == 2


# ---- a stopped process is alive


@pytest.mark.parametrize("slots", [1, 2])
def test_stopped_reader_keeps_its_pin_and_is_named(start, slots):
    reader = start()
    with shmsync.Publisher(stamped(1), slots=slots) as pub, shmsync.Subscriber(pub.handle) as other:
        reader.call(attach, pub.handle, worker=3)
        reader.call(enter)
        reader.stop()
        for v in range(2, slots + 1):
            pub.publish(stamped(v))
        with pytest.raises(shmsync.ReaderStalled, match="worker 3") as caught:
            pub.publish(stamped(slots + 1), timeout=0.2)
        assert caught.value.missing == [3]
        with pytest.raises(shmsync.ReaderStalled), pub.update(timeout=0.2):
            pass
        assert pub.version == slots
        assert read(other) == (slots,) * 3  # the gate is open again, and nothing was written
        (info,) = [r for r in pub.readers() if r.worker == 3]
        assert (info.state, info.pinned, info.pid) == ("stopped", 1, reader.pid)
        assert info.pin_age > 0
        reader.resume()
        assert reader.call(leave) is False
        assert pub.publish(stamped(slots + 1)) == slots + 1
        assert reader.call(look) == read(other) == (slots + 1,) * 3


def test_stopped_worker_is_named_when_it_does_not_apply(start):
    reader = start()
    with shmsync.Publisher(stamped(1)) as pub:
        reader.call(attach, pub.handle, worker=3)
        reader.stop()
        for version, wait in ((2, "all"), (3, [3])):
            with pytest.raises(shmsync.AckTimeout, match="worker 3") as caught:
                pub.publish(stamped(version), wait=wait, timeout=0.2)
            assert (caught.value.missing, caught.value.version, pub.version) == ([3], version, version)
        reader.resume()
        reader.start(apply_until, 4)
        assert pub.publish(stamped(4), wait="all") == 4
        assert reader.result() == 4


def test_stopped_publisher_is_alive(start, name):
    writer = start()
    with shmsync.Subscriber(writer.call(open_arena, name=name)) as sub:
        writer.stop()
        with pytest.raises(shmsync.PublishTimeout):
            sub.wait_version(2, timeout=0.2)
        with pytest.raises(shmsync.ArenaExists):
            shmsync.Publisher(stamped(1), name=name)
        assert cli.main(["gc"]) == 0
        writer.resume()
        writer.call(publish, 2)
        assert read(sub) == (2, 2, 2)


# ---- an update fails half way


def fail_half_way(pub):
    with pub.update() as weights:
        weights["large"].fill_(2)
        raise ZeroDivisionError


def test_failed_update_in_place_poisons_until_a_full_publish(start):
    waiter = start()
    with (
        shmsync.Publisher(stamped(1)) as pub,
        shmsync.Subscriber(pub.handle) as sub,
        shmsync.Subscriber(pub.handle, consistency="optimistic") as optimistic,
    ):
        waiter.call(attach, pub.handle)
        with pytest.raises(ZeroDivisionError):
            fail_half_way(pub)
        assert pub.version == 1
        for reader in (sub, optimistic):
            for call in (lambda: read(reader, timeout=for_ever), lambda: reader.run(print), reader.snapshot):  # noqa: B023
                with pytest.raises(shmsync.Poisoned):
                    call()
        with pytest.raises(shmsync.PublishTimeout):
            waiter.call(wait_version, 2, timeout=0.2)
        waiter.start(wait_version, 2, timeout=for_ever)
        with pytest.raises(shmsync.Poisoned, match="all"):
            pub.publish({"scalar": torch.tensor(2)})
        with pytest.raises(shmsync.Poisoned), pub.update():
            pass
        with pytest.raises(shmsync.Poisoned):
            read(sub)
        with shmsync.Subscriber(pub.handle) as joiner:
            with pytest.raises(shmsync.Poisoned):
                read(joiner)
            assert pub.publish(stamped(2)) == 2  # the number of the one that failed
            assert read(joiner) == (2, 2, 2)
        assert waiter.result() == 2
        assert read(sub) == read(optimistic) == waiter.call(look) == (2, 2, 2)
        with pub.update() as weights:
            stamp(weights, 3)
        assert read(sub) == (3, 3, 3)


def test_failed_update_of_a_spare_slot_just_goes_away():
    with shmsync.Publisher(stamped(1), slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        with pytest.raises(ZeroDivisionError):
            fail_half_way(pub)
        assert pub.version == 1
        assert read(sub) == (1, 1, 1)
        with pub.update() as weights:
            assert stamps(weights) == (1, 1)
            stamp(weights, 2)
        assert read(sub) == (2, 2, 2)


# ---- calls that would wait for themselves


@pytest.mark.parametrize("slots", [1, 2])
def test_publish_that_its_own_pin_blocks_is_refused_at_once(slots):
    with (
        shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub,
        shmsync.Subscriber(pub.handle) as sub,
    ):
        with sub.read() as section:
            for v in range(2, slots + 1):
                pub.publish(stamped(v))
            with pytest.raises(shmsync.ProtocolError):
                pub.publish(stamped(slots + 1))
            with pytest.raises(shmsync.ProtocolError), pub.update():
                pass
            assert (section.version, *stamps(section.weights)) == (1, 1, 1)
        assert pub.version == slots
        assert pub.publish(stamped(slots + 1)) == slots + 1
        assert read(sub) == (slots + 1,) * 3


def test_waiting_for_a_version_inside_a_section_of_an_in_place_arena_is_refused():
    with shmsync.Publisher(stamped(1)) as pub, shmsync.Subscriber(pub.handle) as sub:
        with sub.read():
            with pytest.raises(shmsync.ProtocolError):
                sub.wait_version(2, timeout=for_ever)
            assert sub.wait_version(1) == 1
        pub.publish(stamped(2))
        assert sub.wait_version(2) == 2


def test_waiting_for_a_version_inside_a_section_works_with_more_slots(start):
    reader = start()
    with shmsync.Publisher(stamped(1), slots=2) as pub:
        reader.call(attach, pub.handle)
        reader.call(enter)
        reader.start(wait_version, 2, timeout=for_ever)
        pub.publish(stamped(2))
        assert reader.result() == 2
        reader.call(leave)
        assert reader.call(look) == (2, 2, 2)


@pytest.mark.parametrize("slots", [1, 2])
def test_nested_writer_calls_are_refused(slots):
    with (
        shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub,
        shmsync.Subscriber(pub.handle) as sub,
    ):
        with pub.update() as weights:
            stamp(weights, 2)
            with pytest.raises(shmsync.WriterBusy), pub.update():
                pass
            with pytest.raises(shmsync.WriterBusy):
                pub.publish(stamped(3))
            with pytest.raises(shmsync.WriterBusy):
                Call(pub.publish, stamped(3)).result()
            with pytest.raises(shmsync.WriterBusy):
                pub.close()
        assert pub.version == 2
        assert read(sub) == (2, 2, 2)


# ---- fork


def test_handles_of_the_parent_raise_in_a_forked_child():
    with shmsync.Publisher(Net(0)) as pub, shmsync.Subscriber(pub.handle, worker=1) as sub:
        module = sub.bind(Net(1))
        calls = {
            "read": lambda: sub.read().__enter__(),
            "refresh": sub.refresh,
            "run": lambda: sub.run(print),
            "snapshot": sub.snapshot,
            "wait_version": lambda: sub.wait_version(1),
            "bind": lambda: sub.bind(Net(2)),
            "forward": lambda: module(torch.zeros(2, 6)),
            "publish": pub.publish,
            "update": lambda: pub.update().__enter__(),
            "adopt": lambda: pub.adopt(Net(3)),
            "readers": pub.readers,
        }
        status, found = in_forked_child(lambda: {what: outcome(call) for what, call in calls.items()})
        assert status == 0
        assert found == dict.fromkeys(calls, "ForkedHandle")
        assert pub.publish() == 2
        assert sub.refresh() is True


def test_forked_child_leaves_the_pin_of_its_parent_alone():
    with shmsync.Publisher(stamped(1)) as pub, shmsync.Subscriber(pub.handle, worker=1) as sub:
        section = sub.read()
        with section:

            def child():
                found = [outcome(section.__exit__, None, None, None)]
                found += [outcome(sub.refresh), outcome(sub.close), outcome(pub.close)]
                gc.collect()
                with shmsync.Subscriber(pub.handle, worker=2) as own:  # a new one works
                    found.append(read(own))
                return found

            status, found = in_forked_child(child)
            assert status == 0
            assert found[1:] == ["ForkedHandle", "returned", "returned", (1, 1, 1)]
            (info,) = pub.readers()
            assert (info.worker, info.pinned) == (1, 1)
            with pytest.raises(shmsync.ReaderStalled) as caught:
                Call(pub.publish, stamped(2), timeout=0.1).result()
            assert caught.value.missing == [1]
        assert segment_path(pub.name).exists()
        assert pub.publish(stamped(2)) == 2
        assert read(sub) == (2, 2, 2)


def test_adopted_parameters_are_read_only_in_a_forked_child():
    net = Net(0)
    with shmsync.Publisher(net) as pub, shmsync.Subscriber(pub.handle) as sub:
        pub.adopt(net)
        before = bytes_of(sub.snapshot().weights)

        def child():
            assert net[0].weight.sum().isfinite()  # readable
            with torch.no_grad():
                net[0].weight.add_(1)

        assert in_forked_child(child) == (-signal.SIGSEGV, None)
        assert bytes_of(sub.snapshot().weights) == before
        with pub.update(), torch.no_grad():
            net[0].weight.add_(1)
        assert bytes_of(sub.snapshot().weights) != before


@pytest.mark.parametrize("slots", [1, 2])
def test_weights_under_update_are_read_only_in_a_forked_child(slots):
    with shmsync.Publisher(stamped(1), slots=slots) as pub, shmsync.Subscriber(pub.handle) as sub:
        with pub.update() as weights:
            stamp(weights, 2)
            assert in_forked_child(lambda: weights["large"].fill_(666)) == (-signal.SIGSEGV, None)

            def finish():
                update = pub.update()
                return outcome(update.__enter__), outcome(pub.publish)

            assert in_forked_child(finish) == (0, ("ForkedHandle", "ForkedHandle"))
            stamp(weights, 3)
        assert read(sub) == (2, 3, 3)


def test_child_that_falls_out_of_the_update_of_its_parent_publishes_nothing():
    with shmsync.Publisher(stamped(1)) as pub, shmsync.Subscriber(pub.handle) as sub:
        update = pub.update()
        with update as weights:
            assert in_forked_child(lambda: outcome(update.__exit__, None, None, None)) == (0, "ForkedHandle")
            assert pub.version == 1
            assert outcome(read, sub, timeout=0) == "WriterBusy"
            stamp(weights, 2)
        assert read(sub) == (2, 2, 2)


# ---- closed


@pytest.mark.parametrize("slots", [1, 2])
def test_last_version_of_a_closed_arena_stays_readable(start, slots):
    waiter = start()
    pub = shmsync.Publisher(stamped(1), slots=slots)
    with shmsync.Subscriber(pub.handle) as sub:
        waiter.call(attach, pub.handle)
        waiter.start(wait_version, 3, timeout=for_ever)
        pub.publish(stamped(2))
        assert sub.refresh() is True
        pub.close()
        with pytest.raises(shmsync.ClosedError):
            waiter.result()
        assert sub.refresh() is False
        assert read(sub) == waiter.call(look) == (2, 2, 2)
        assert sub.wait_version(2) == 2
        with pytest.raises(shmsync.ClosedError):
            sub.wait_version(3, timeout=for_ever)
        assert waiter.call(refresh) is False
        with pytest.raises(shmsync.ArenaNotFound):
            shmsync.Subscriber(pub.handle)
        for call in (pub.publish, pub.readers, lambda: pub.weights):
            with pytest.raises(shmsync.ClosedError):
                call()
        pub.close()
    with pytest.raises(shmsync.ClosedError):
        sub.refresh()
    with pytest.raises(shmsync.ClosedError):
        read(sub)


@pytest.mark.parametrize("slots", [1, 2])
def test_views_never_dangle(start, name, slots):
    writer = start()
    handle = writer.call(open_arena, 3, name=name, slots=slots)
    sub = shmsync.Subscriber(handle)
    module_view, whole = sub.weights["layer", "weight"], sub.weights
    sub.close()
    del sub
    gc.collect()
    writer.kill()
    assert (module_view == 3).all()
    assert stamps(whole) == (3, 3)
    del whole
    gc.collect()
    assert (module_view == 3).all()


def test_views_of_a_publisher_outlive_it():
    net = Net(0)
    pub = shmsync.Publisher(net)
    sub = shmsync.Subscriber(pub.handle)
    module = sub.bind(Net(1)).eval()
    pub.adopt(net)
    view = pub.weights["0", "weight"]
    with pub.update() as weights:
        written = weights["0", "bias"]
        written.fill_(5)
    expected = net[0].weight.detach().clone()
    pub.close()
    sub.close()
    del pub, sub, weights
    gc.collect()
    assert torch.equal(view, expected)
    assert (written == 5).all()
    assert torch.equal(module[0].weight, expected)
    with torch.no_grad():
        net[0].weight.add_(1)  # private again
    assert torch.equal(view, expected)


# ---- garbage in the reader table

GARBAGE = {
    "pin of all ones": [(PIN, word(2**64 - 1))],
    "pin of a slot that is not there": [(PIN, word((1 << 8 | 100) + 1))],
    "pin of the future": [(PIN, word((10**9 << 8) + 1))],
    "pin with the gate": [(PIN, word((1 << 8 | 1 << 7) + 1))],
    "no owner, but a pin": [(OWNER, word(0)), (PIN, word((1 << 8) + 1))],
    "an owner nobody is": [(OWNER, word(2**64 - 1)), (PIN, word((1 << 8) + 1))],
    "ones all over": [(0, b"\xff" * 128)],
    "random bytes": [(0, secrets.token_bytes(128))],
}


@pytest.mark.parametrize("slots", [1, 2])
def test_garbage_in_the_reader_table_does_not_stop_the_writer(start, slots):
    vandal, witness = start(2)
    for what, writes in GARBAGE.items():
        with shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub:
            witness.call(attach, pub.handle, worker=1)
            vandal.call(attach, pub.handle, worker=2)
            for offset, content in writes:
                vandal.call(write_row, offset, content)
            for v in range(2, 6):
                assert pub.publish(stamped(v)) == v, what
                assert witness.call(look) == (v, v, v), what
            pub.readers()
            # Whoever wrote it reads right weights, or is told.
            vandal.start(look)
            try:
                assert vandal.result() == (5, 5, 5), what
            except shmsync.ProtocolError:
                pass
            vandal.call(detach)
            vandal.call(attach, pub.handle, worker=2)
            assert vandal.call(look) == (5, 5, 5), what
            witness.call(detach)
            vandal.call(detach)
            assert pub.publish(stamped(6)) == 6, what


def test_acknowledgement_from_the_future_is_not_believed(start):
    vandal = start()
    with shmsync.Publisher(stamped(1)) as pub:
        vandal.call(attach, pub.handle, worker=2)
        vandal.call(write_row, ACKED, word(2**63))
        for wait in ("all", [2]):
            with pytest.raises((shmsync.AckTimeout, shmsync.WorkerDied)) as caught:
                pub.publish(stamped(pub.version + 1), wait=wait, timeout=0.2)
            assert caught.value.missing == [2]
        pub.readers()


def test_evicted_reader_does_not_write_the_row_of_its_successor(start):
    vandal, heir = start(2)
    with shmsync.Publisher(stamped(1)) as pub:
        vandal.call(attach, pub.handle, worker=1)
        vandal.call(enter)
        vandal.call(write_row, PIN, word(2**64 - 1))
        pub.publish(stamped(2))
        heir.call(attach, pub.handle, worker=2)
        heir.call(enter)
        vandal.call(leave)
        (info,) = pub.readers()
        assert (info.worker, info.pinned) == (2, 2)
        outcome(vandal.call, detach)
        (info,) = pub.readers()
        assert (info.worker, info.pinned) == (2, 2)
        with pytest.raises(shmsync.ReaderStalled):
            pub.publish(stamped(3), timeout=0.1)


def test_reader_table_layout_is_where_these_tests_think(start):
    reader = start()
    with shmsync.Publisher(stamped(1)) as pub:
        reader.call(attach, pub.handle, worker=9)
        reader.call(enter)
        with open(segment_path(pub.name), "rb") as file:
            file.seek(rows_offset(_native.read_identity(file.fileno())))
            owner, pin, acked, _want, worker = struct.unpack("<QQQIi", file.read(32))
        assert owner >> 42 == reader.pid
        assert (pin, acked, worker) == ((1 << 8) + 1, 1, 9)


# ---- found by review


@pytest.mark.parametrize("slots", [1, 2])
def test_named_worker_killed_inside_its_section_is_reported(start, slots):
    """The wait for its pin takes its row; the wait for its ack must still know of it."""
    victim = start()
    with shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub:
        victim.call(attach, pub.handle, worker=7)
        victim.call(enter)
        for v in range(2, slots + 1):
            pub.publish(stamped(v))
        call = Call(pub.publish, stamped(slots + 1), wait=[7])
        until(lambda: pub._side.lock.locked())
        victim.kill()
        with pytest.raises(shmsync.WorkerDied) as caught:
            call.result()
        assert caught.value.missing == [7]
        assert pub.version == slots + 1


def test_attaching_to_an_arena_whose_creator_died_does_not_wait_for_ever(start, name):
    victim = start()
    victim.start(create_and_stall, name)
    until(lambda: segment_path(name).exists() and segment_path(name).stat().st_size > 0)
    victim.kill()
    with pytest.raises(shmsync.WriterDied):
        shmsync.Subscriber(name, timeout=for_ever)
    with shmsync.Publisher(stamped(1), name=name) as pub:  # sweeps it
        assert shmsync.Subscriber(pub.handle).close() is None
