"""Streams of a device as torch has them: private copies there are renewed after the kernels that read them.

torch's module for the device is a proxy that notes what it is asked for.
"""

import types

import pytest
import torch

from shmsync.engine.read.device_sections import PrivateCopies, TorchStreams
from shmsync.errors import ProtocolError


class Event:
    pass


class Stream:
    done = False

    def __init__(self, device=None):
        self.name, self.device = f"new on {device}", device

    def wait_stream(self, other):
        log.append(("wait", self.name, other.name))

    def wait_event(self, event):
        log.append(("wait", self.name, "event"))

    def query(self):
        return self.done

    def synchronize(self):
        log.append(("synchronize", self.name))


log = []


@pytest.fixture
def streams():
    log.clear()
    Stream.done = False
    current = Stream()
    current.name = "current"
    module = types.SimpleNamespace(Stream=Stream, Event=Event, current_stream=lambda device: current)
    module.is_current_stream_capturing = lambda: module.captures
    module.captures = False
    return TorchStreams(torch.device("xpu", 1), module), module


def test_streams_renew_the_copies_and_read_them_in_turns(streams):
    copies = PrivateCopies(streams[0])
    copies.noted.name, other = "noted", Stream("xpu:1")
    other.name = "other"
    copies.note([streams[0].as_stream(other), streams[0].as_stream(Event())])
    with copies.renewing():
        log.append("copy")
    copies.use()
    assert log == [
        ("wait", "noted", "current"), ("wait", "noted", "other"), ("wait", "noted", "event"),
        ("wait", "current", "noted"), "copy", ("wait", "new on xpu:1", "current"), ("wait", "noted", "current"),
        ("wait", "current", "new on xpu:1"),
    ]  # fmt: skip


def test_what_is_renewed_is_not_waited_for(streams):
    copies = PrivateCopies(streams[0])
    with copies.renewing():
        pass
    log.clear()
    Stream.done = True
    copies.use()
    copies.use()
    assert log == []
    assert not copies.pending


@pytest.mark.parametrize("can_be_asked", [True, False])
def test_a_capture_stands_still_until_the_copies_are_new(streams, can_be_asked, monkeypatch):
    if not can_be_asked:
        monkeypatch.delattr(Stream, "query")
    copies = PrivateCopies(streams[0])
    with copies.renewing():
        pass
    log.clear()
    streams[1].captures = True
    with pytest.raises(ProtocolError, match="inside a read section"):
        copies.refuse_capture()
    copies.use()
    assert log == [("synchronize", "new on xpu:1")]
    assert not copies.pending


def test_nothing_of_a_capture_is_noted(streams):
    copies = PrivateCopies(streams[0])
    streams[1].captures = True
    copies.note([])
    assert log == []


def test_what_is_no_stream_is_refused(streams):
    with pytest.raises(TypeError, match=r"xpu:1.*'a stream'"):
        streams[0].as_stream("a stream")
