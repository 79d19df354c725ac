"""Streams, events, copies and captures by CUDA's calls, over the proxy."""

import threading
import time

import pytest

from shmsync.errors import DeviceFailed, ProtocolError
from shmsync.memory.cuda.gpu import Gpu
from support.devices.standin_cuda import Code, Proxy, World, gpu
from support.devices.standin_torch import TorchEvent


def test_follow_orders_by_an_event_of_the_streams_own_gpu():
    calls = Proxy(World(2), visible=(0, 1))
    first, second = Gpu(0, calls, calls.side), Gpu(1, calls, calls.side)
    mine, other = first.stream(), second.stream()
    seen, gate = [], threading.Event()
    calls.stream_of(other.cuda_stream).give(gate.wait)
    calls.stream_of(other.cuda_stream).give(lambda: seen.append("first"))
    first.follow(mine, other)
    calls.stream_of(mine.cuda_stream).give(lambda: seen.append("later"))
    assert not first.wait(mine, 0.02)
    gate.set()
    assert first.wait(mine, 20)
    assert seen == ["first", "later"]


def test_streams_and_events_of_torch_are_taken():
    device = gpu()
    mine, theirs = device.stream(), device.stream()
    assert device.as_stream(theirs) is theirs
    with device._here("recording"):
        event = theirs.record_event()
    assert device.as_stream(event) is event
    device.follow(mine, event)
    assert device._calls.log[-2] == ("cudaStreamWaitEvent", (mine.cuda_stream, event.work))
    with pytest.raises(TypeError, match="never been recorded"):
        device.as_stream(TorchEvent(device._calls))
    with pytest.raises(TypeError, match="stream or an event of cuda:0 is needed"):
        device.as_stream(3)


def fails(calls, name, code):
    """From now on this call fails."""

    def fail(*arguments):
        calls.log.append((name, arguments))
        calls.last_error = code
        return Code(code), None

    setattr(calls, name, fail)


def test_the_default_stream_counts_as_captured_while_a_stream_that_it_would_wait_for_is():
    device = gpu()
    fails(device._calls, "cudaStreamIsCapturing", 906)
    assert device.capturing(device.current())
    assert device._calls.last_error == 0  # torch is not blamed for it


@pytest.mark.parametrize("use", ["wait", "follow"])
def test_a_stream_that_is_captured_is_not_waited_for(use):
    device = gpu()
    mine, captured = device.stream(), device.stream()
    device._calls.capturing.add(captured.cuda_stream)
    with pytest.raises(ProtocolError, match="before or after the capture"):
        device.wait(captured, 1) if use == "wait" else device.follow(mine, captured)
    assert "cudaEventRecord" not in device._calls.names()


def test_wait_keeps_its_deadline():
    device = gpu()
    stream, gate = device.stream(), threading.Event()
    device._calls.stream_of(stream.cuda_stream).give(gate.wait)
    started = time.monotonic()
    assert not device.wait(stream, 0.05)
    assert time.monotonic() - started < 5
    gate.set()
    assert device.wait(stream, 20)


def test_an_error_that_comes_late_is_found_by_check():
    device = gpu()
    device.check()
    device._calls.fail_at, device._calls.code = len(device._calls.log), 700
    with pytest.raises(DeviceFailed, match="end it, and look for the kernel"):
        device.check()
