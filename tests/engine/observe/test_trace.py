"""A trace of an arena: one file, with what all its processes did, as the Trace Event Format has it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import random
import signal
import threading
import time

import pytest
import torch

import shmsync
from shmsync.engine.publish_all import Publication, publish_all
from support.calls import Call
from support.devices.on_simulated import end_trace_during_publish
from support.faults.interrupts import Interrupt, interrupt_at
from support.jobs import engine
from support.processes import descriptors, until, until_waits


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trace.json"


def events(file):
    """What the file has, which needs no end to be read."""
    found = json.loads(file.read_text() + "]")
    assert found[0]["name"] == "shmsync trace"
    assert file.stat().st_size % 256 == 0  # no line crosses a page, between which the kernel may stop a killed process
    for event in found:
        assert event["ph"] in "XiM" and isinstance(event["pid"], int)
    refuse_overlaps([event for event in found if event["ph"] == "X"])
    return found


def refuse_overlaps(spans):
    """Viewers drop a span that begins inside another one of its thread and ends after it."""
    open_until = {}
    for each in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        end, ends = each["ts"] + each["dur"], open_until.setdefault((each["pid"], each["tid"]), [])
        while ends and ends[-1] <= each["ts"] + 0.0005:  # of what is written in nanoseconds
            ends.pop()
        assert not ends or end <= ends[-1] + 0.0005, f"{each} ends after what it lies in"
        ends.append(end)


def of(file, name, pid=None):
    return [each for each in events(file) if each["name"] == name and pid in (None, each["pid"])]


def versions(file, name, pid=None):
    return [each["args"]["version"] for each in of(file, name, pid)]


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


def test_a_trace_begins_and_ends_beside_a_thread_that_publishes(tmp_path):
    """Neither the publishes nor the traces are refused, and a trace has whole publishes only."""
    with shmsync.Publisher({"t": torch.zeros(100_000)}) as pub:
        over = threading.Event()

        def publish():
            while not over.is_set():
                pub.publish()
                with pub.update():
                    pass

        publishing = Call(publish)
        try:
            for number in range(300):
                with pub.trace(tmp_path / f"{number % 3}.json"):
                    time.sleep(0.0005)
        finally:
            over.set()
        publishing.result()
        assert all(of(tmp_path / f"{number}.json", "publish") for number in range(3))
        assert not descriptors_of(tmp_path / "0.json")


def test_a_trace_that_ends_during_a_publish_needs_no_interpreter_on_the_devices_thread(start, file):
    """The device's thread drops the trace; with a reference of Python's it waited for the GIL, with the lock held."""
    assert start().call(end_trace_during_publish, file) == (True, True)
    assert of(file, "publish") and not descriptors_of(file)


def test_arenas_that_are_published_together_have_tracks_of_their_own(file):
    with shmsync.Publisher({"t": torch.zeros(8)}) as one, shmsync.Publisher({"t": torch.zeros(8)}) as other:
        with one.trace(file), other.trace(file):
            together = [Publication(each._writer, {"t": torch.ones(8)}) for each in (one, other)]
            for _ in range(3):
                publish_all(together, None, time.monotonic() + 20)
        tracks = {each["args"]["arena"]: each["tid"] for each in of(file, "publish")}
        assert len(set(tracks.values())) == 2
        named = {each["tid"]: each["args"]["name"] for each in of(file, "thread_name")}
        assert named == {tracks[pub.name]: f"writer of {pub.name}" for pub in (one, other)}


def test_a_file_that_somebody_has_locked_is_waited_for_until_the_deadline(file):
    with shmsync.Publisher({"t": torch.zeros(8)}, timeout=0.2) as pub, open(file, "w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match=r"locked.*trace\.json"):
            pub.trace(file)
        fcntl.flock(locked, fcntl.LOCK_UN)
        with pub.trace(file):
            assert pub.publish() == 2
        assert versions(file, "publish") == [2]


def test_a_trace_that_ends_in_the_middle_of_a_line_is_not_gone_on_with(file):
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub:
        with pub.trace(file):
            pub.publish()
        half = file.read_bytes()[:-100]
        file.write_bytes(half)
        with pytest.raises(FileExistsError, match="none that is whole"):
            pub.trace(file)
        assert file.read_bytes() == half


def test_a_verify_that_finds_the_gate_closed_shows_no_section(file):
    pytest.importorskip("xxhash")
    with (
        shmsync.Publisher({"t": torch.zeros(8)}, checksum=True) as pub,
        shmsync.Subscriber(pub.handle, timeout=0.05) as sub,
        pub.trace(file),
    ):
        with sub.read():
            pass
        with pub.update(), pytest.raises(shmsync.WriterBusy):
            sub.verify()
        assert versions(file, "section") == [1]
        assert sub.verify().version == 2


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


def test_the_environment_traces_every_publisher_from_its_first_version_on(monkeypatch, file, tmp_path):
    monkeypatch.setenv("SHMSYNC_TRACE", str(file))
    with shmsync.Publisher({"t": torch.zeros(8)}) as one, shmsync.Publisher({"t": torch.zeros(8)}) as other:
        one.publish()
        with pytest.raises(shmsync.ProtocolError, match="is being traced into .*trace.json; stop"):
            one.trace(tmp_path / "another.json")
        assert not (tmp_path / "another.json").exists()
        found = [(each["args"]["arena"], each["args"]["version"]) for each in of(file, "publish")]
        assert found == [(one.name, 1), (other.name, 1), (one.name, 2)]
    monkeypatch.setenv("SHMSYNC_TRACE", str(tmp_path / "nowhere" / "trace.json"))
    with pytest.raises(FileNotFoundError, match=r"No such file.*SHMSYNC_TRACE.*nowhere"):
        shmsync.Publisher({"t": torch.zeros(8)})


def test_the_file_has_a_name_by_default_and_may_be_stopped_twice(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with shmsync.Publisher({"t": torch.zeros(8)}, name="policy-of-traces") as pub:
        tracing = pub.trace()
        pub.publish()
        tracing.stop()
        tracing.stop()
        assert "stopped" in repr(tracing)
        with pub.trace():
            pub.publish()
    assert versions(tmp_path / "shmsync-policy-of-traces.trace.json", "publish") == [2, 3]
    with pytest.raises(shmsync.ClosedError):
        pub.trace()


@pytest.mark.parametrize("content", [b"[\n", b"precious", b'[{"name":"another program"}]'])
def test_a_file_that_is_no_trace_stays_as_it_is(tmp_path, content):
    file = tmp_path / "file"
    file.write_bytes(content)
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub:
        with pytest.raises(FileExistsError, match="no trace of shmsync"):
            pub.trace(file)
        assert file.read_bytes() == content
        pub.publish()
        with pub.trace(tmp_path / "another"):  # the failed one is forgotten
            pub.publish()


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / kind
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub, pytest.raises(OSError, match=kind):
        pub.trace(path)


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog):
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub, shmsync.Subscriber(pub.handle) as sub:
        tracing = pub.trace("/dev/shm/shmsync-test-trace")
        try:
            full = os.open("/dev/full", os.O_WRONLY | os.O_APPEND)
            (fd,) = descriptors_of("/dev/shm/shmsync-test-trace")
            os.dup2(full, fd, inheritable=False)
            os.close(full)
            pub.publish()
            with sub.read() as section:
                assert section.version == 2
            with caplog.at_level(logging.WARNING, "shmsync"):
                tracing.stop()
        finally:
            os.unlink("/dev/shm/shmsync-test-trace")
        assert "lacks the last of what this process did: No space left on device" in caplog.text
        assert pub.publish() == 3


def descriptors_of(path):
    """Those of this process."""
    return [fd for fd, target in descriptors().items() if target == str(path)]


def test_a_reader_that_cannot_join_in_says_so_and_reads_on(caplog, file):
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub, shmsync.Subscriber(pub.handle) as sub:
        with pub.trace(file):
            file.chmod(0o600)
            file.write_bytes(b"another file " * 10)  # by whoever has the same idea of its name
            with caplog.at_level(logging.WARNING, "shmsync"), sub.read() as section:
                assert section.version == 1
        assert "missing in the trace" in caplog.text and "no trace of shmsync" in caplog.text


def test_a_subscriber_that_follows_is_traced_by_the_next_trainer_too(file):
    pub = shmsync.Publisher({"t": torch.zeros(8)}, name="traced-twice")
    with shmsync.Subscriber("traced-twice", follow=True, worker=1) as sub:
        with pub.trace(file), sub.read():
            pass
        pub.close()
        with shmsync.Publisher({"t": torch.ones(8)}, name="traced-twice") as pub, pub.trace(file):
            sub.refresh()
            before = len(of(file, "section"))
            with sub.read() as section:
                assert section.weights["t"][0] == 1
            assert len(of(file, "section")) == before + 1


def test_verify_and_trace_are_asked_for_side_by_side(start, file):
    pytest.importorskip("xxhash")
    with shmsync.Publisher(engine.stamped(1), checksum=True, timeout=20.0) as pub:
        reader = start()
        reader.call(engine.attach, pub.handle, worker=0)

        def verified():
            asking = Call(pub.verify)
            while asking.is_alive():
                reader.call(engine.look)
            return asking.result().workers

        for count in range(1, 4):
            with pub.trace(file):
                assert verified() == (0,)
                assert len(of(file, "process_name", reader.pid)) == count
            assert verified() == (0,)
            seen = file.read_bytes()
            assert verified() == (0,)
            assert file.read_bytes() == seen


def test_a_traced_publisher_leaves_no_descriptor(tmp_path):
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub, shmsync.Subscriber(pub.handle) as sub:
        before = len(descriptors())
        for _ in range(5):
            with pub.trace(tmp_path / "trace.json"), sub.read():
                pass
            with sub.read():
                pass
        assert len(descriptors()) == before
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub:
        pub.trace(tmp_path / "trace.json")
    assert len(descriptors()) < before


def test_a_reader_that_saw_nothing_of_the_end_of_a_trace_joins_the_next(start, tmp_path):
    with shmsync.Publisher(engine.stamped(1)) as pub:
        reader = start()
        reader.call(engine.attach, pub.handle, worker=0)
        for number in range(3):
            file = tmp_path / f"{number}.json"
            with pub.trace(file):
                reader.call(engine.look)
                assert len(of(file, "section", reader.pid)) == 1


def test_refresh_says_that_it_moved_though_it_was_asked_something():
    pytest.importorskip("xxhash")
    with (
        shmsync.Publisher(engine.stamped(1), checksum=True, timeout=20.0) as pub,
        shmsync.Subscriber(pub.handle, worker=0) as sub,
    ):
        asking = Call(pub.verify)
        while not sub._reader.question:
            time.sleep(0.001)
        pub.publish(engine.stamped(2))
        assert sub.refresh() is True and sub.version == 2
        assert asking.result().workers == (0,)


# Handlers of signals are called behind calls. So none is called where a `with` is left, before __exit__() is, nor at a
# bare `try`, nor before the first call of a `finally`, nor at the end of a function.
NO_HANDLER = ("with ", "try:", "os.close(", "return ")


@pytest.mark.parametrize("step", ["trace", "stop"])
def test_an_interrupt_at_any_line_leaves_a_publisher_that_can_be_traced(file, step):
    """`step`: in which it lands."""
    names = {"trace": {"trace", "__init__", "_opened", "begin", "write_to"}, "stop": {"stop", "ended", "write_to"}}

    def wanted(code):
        return os.path.basename(code.co_filename) in ("tracing.py", "writing.py") and code.co_name in names[step]

    for line in itertools.count():
        with shmsync.Publisher({"t": torch.zeros(8)}) as pub:
            tracing = None if step == "trace" else pub.trace(file)
            with interrupt_at(line, wanted, NO_HANDLER) as raised, contextlib.suppress(Interrupt):
                if tracing is None:
                    pub.trace(file)
                else:
                    tracing.stop()
            if tracing is not None:
                tracing.stop()
            elif raised:
                with pub.trace(file):
                    pub.publish()
            pub.publish()
        assert descriptors_of(file) == []
        if not raised:
            break
    assert line > 5
