"""A trace of an arena: one file, with what all its processes did, as the Trace Event Format has it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest
import torch

import shmsync
from support.calls import Call
from support.jobs import engine
from support.processes import until, until_waits
from support.trace_file import events, of, versions


@pytest.mark.parametrize("slots", [1, 2])
def test_publishes_sections_acks_and_waits_of_all_processes(start, file, slots):
    with shmsync.Publisher(engine.stamped(1), slots=slots, timeout=20.0) as pub:
        readers = start(2)
        for index, each in enumerate(readers):
            each.call(engine.attach, pub.handle, worker=index, timeout=20.0)
        with pub.trace(file) as tracing:
            assert tracing.file == str(file)
            for each in readers:
                each.call(engine.look)  # it joins in
            pub.publish(engine.stamped(2))
            for each in readers:
                each.start(engine.wait_version, 3)
            time.sleep(0.05)
            pub.publish(engine.stamped(3))
            for each in readers:
                assert each.result() == 3
                each.call(engine.enter)
            leaving = Call(leave_later, readers)
            assert pub.publish(engine.stamped(4)) == 4
            leaving.result()
            for each in readers:
                each.start(engine.apply_until, 5)
            assert pub.publish(engine.stamped(5), wait=[0, 1]) == 5
            for each in readers:
                each.result()
        for each in readers:
            each.call(engine.look)  # it sees that the trace is over
        seen = file.read_bytes()
        pub.publish(engine.stamped(6), wait=[])
        for each in readers:
            each.call(engine.look)
        assert file.read_bytes() == seen

        names = {each["pid"]: each["args"]["name"] for each in of(file, "process_name")}
        assert names == {os.getpid(): "trainer", readers[0].pid: "worker 0", readers[1].pid: "worker 1"}
        assert versions(file, "publish", os.getpid()) == [2, 3, 4, 5]
        assert versions(file, "wait for acks", os.getpid()) == [5]
        assert (4 in versions(file, "wait for readers", os.getpid())) == (slots == 1)  # of devices others may too
        for each in readers:
            assert {3, 5} <= set(versions(file, "ack", each.pid)) & set(versions(file, "section", each.pid))
            (waited,) = of(file, "wait for a version", each.pid)
            assert waited["args"]["version"] == 3 and waited["dur"] > 20_000
            held = [section["dur"] for section in of(file, "section", each.pid) if section["args"]["version"] == 3]
            assert max(held) > 50_000
        assert all(each["args"]["arena"] == pub.name for each in events(file)[1:] if each["ph"] != "M")


def leave_later(readers):
    time.sleep(0.1)
    for each in readers:
        each.call(engine.leave)


def test_times_of_all_processes_are_of_one_clock(start, file):
    with shmsync.Publisher(engine.stamped(1), slots=2) as pub, pub.trace(file):
        reader = start()
        reader.call(engine.attach, pub.handle, worker=3)
        for version in range(2, 20):
            pub.publish(engine.stamped(version), wait=[])
            assert reader.call(engine.look)[0] == version
        published = {each["args"]["version"]: each["ts"] for each in of(file, "publish")}
        acks = {each["args"]["version"]: each["ts"] for each in of(file, "ack", reader.pid)}
        for version in range(3, 19):
            assert published[version] < acks[version] < published[version + 1]


@pytest.mark.full  # the tests above kill one
def test_many_killed_workers_leave_whole_lines(file):
    chance = random.Random(1)
    with shmsync.Publisher(engine.stamped(1), slots=2) as pub, pub.trace(file):
        for _ in range(60):
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException), shmsync.Subscriber(pub.handle) as sub:
                    while True:
                        with sub.read():
                            pass
                os._exit(1)
            enough = file.stat().st_size + chance.randint(20, 60) * 256
            until(lambda enough=enough: file.stat().st_size >= enough)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert len(of(file, "section")) > 1000
        assert {each["args"]["name"] for each in of(file, "process_name")} == {"trainer", "reader"}
        assert pub.publish(engine.stamped(2)) == 2




def test_a_wait_at_the_gate_ends_where_its_section_begins(file):
    """To the nanosecond: what overlaps is dropped by viewers."""
    with (
        shmsync.Publisher({"t": torch.zeros(8)}) as pub,
        shmsync.Subscriber(pub.handle, timeout=20.0) as sub,
        pub.trace(file),
    ):
        sub.refresh()

        def read():
            with sub.read():
                pass

        with pub.update():
            reading = Call(read)
            until_waits(reading, "_enter_slowly")
        reading.result()
        (gate,), section = of(file, "wait at the gate"), of(file, "section")[-1]
        assert round(1000 * (gate["ts"] + gate["dur"])) == round(1000 * section["ts"])


def test_a_publish_that_fails_is_seen(file):
    with shmsync.Publisher({"t": torch.zeros(8)}, slots=2) as pub, pub.trace(file):
        with pytest.raises(KeyError), pub.update():
            raise KeyError
        assert versions(file, "failed publish") == [2]
        pub.publish()
        assert versions(file, "publish") == [2]
