"""Where a trace is written: names, files that are no trace or cannot be written, and the environment."""

from __future__ import annotations

import fcntl
import logging
import os

import pytest
import torch

import shmsync
from support.trace_file import descriptors_of, of, versions


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
