"""Streams of a device as torch has them: private copies there are renewed after the kernels that read them.

torch's module for the device is a proxy that notes what it is asked for.
"""

import types

import pytest
import torch

from shmsync.engine.read.device_sections import CopyReads, TorchStreams


class Event:
    pass


class Stream:
    def __init__(self, device=None):
        self.name, self.device = f"new on {device}", device

    def wait_stream(self, other):
        log.append(("wait", self.name, other.name))

    def wait_event(self, event):
        log.append(("wait", self.name, "event"))

    def synchronize(self):
        log.append(("synchronize", self.name))


log = []


@pytest.fixture
def streams():
    log.clear()
    current = Stream()
    current.name = "current"
    module = types.SimpleNamespace(Stream=Stream, Event=Event, current_stream=lambda device: current)
    module.is_current_stream_capturing = lambda: module.captures
    module.captures = False
    return TorchStreams(torch.device("xpu", 1), module), module


def test_copies_are_renewed_after_what_was_noted_and_are_new_at_the_end(streams):
    reads = CopyReads(streams[0])
    other = Stream("xpu:1")
    other.name = "other"
    reads.end([streams[0].as_stream(other), streams[0].as_stream(Event())])
    with reads.renewing():
        log.append("copy")
    noted = "new on xpu:1"
    assert log == [
        ("wait", noted, "current"), ("wait", noted, "other"), ("wait", noted, "event"),
        ("wait", "current", noted), "copy", ("synchronize", "current"),
    ]  # fmt: skip


def test_nothing_of_a_capture_is_noted(streams):
    reads = CopyReads(streams[0])
    streams[1].captures = True
    reads.end([])
    assert log == []


def test_what_is_no_stream_is_refused(streams):
    with pytest.raises(TypeError, match=r"xpu:1.*'a stream'"):
        streams[0].as_stream("a stream")
