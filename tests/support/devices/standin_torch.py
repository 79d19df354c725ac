"""What shmsync asks of torch for memory of a GPU, beside the proxy for CUDA (standin_cuda.py)."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from support.devices.simulated import copies_are_done_by
from support.devices.streams import HOST


class TorchError(RuntimeError):
    """As torch.AcceleratorError."""

    def __init__(self, code):
        super().__init__(f"CUDA error: {int(code)}\nWords of the proxy.")
        self.error_code = int(code)


def told(calls, name, *arguments):
    """What torch makes of a call to CUDA."""
    code, *values = getattr(calls, name)(*arguments)
    if code:
        calls.last_error = 0
        raise TorchError(code)
    return values


class TorchStream:
    """As torch.cuda.ExternalStream: it makes its GPU the current one for each call."""

    def __init__(self, calls, handle, index):
        self._calls, self.cuda_stream, self.device = calls, handle, torch.device("cuda", index)

    def __eq__(self, other):
        same = isinstance(other, TorchStream)
        return same and (self.cuda_stream, self.device) == (other.cuda_stream, other.device)

    def __hash__(self):
        return hash((self.cuda_stream, self.device))

    def record_event(self):
        with self._calls.side.on(self.device.index):
            return TorchEvent(self._calls, *told(self._calls, "cudaEventRecord", self.cuda_stream), self.device)

    def wait_event(self, event):
        with self._calls.side.on(self.device.index):
            told(self._calls, "cudaStreamWaitEvent", self.cuda_stream, event.work)

    def query(self):
        with self._calls.side.on(self.device.index):
            return told(self._calls, "cudaStreamQuery", self.cuda_stream)[0]


class TorchEvent:
    """As torch.cuda.Event. Without `work` it was never recorded."""

    def __init__(self, calls, work=None, device=None):
        self._calls, self.work, self.device, self.cuda_event = calls, work, device, int(work is not None)

    def query(self):
        return told(self._calls, "cudaEventQuery", self.work)[0]


class StandInTorch:
    """What is asked of torch, see TorchSide in shmsync/memory/cuda/calls.py."""

    def __init__(self, calls):
        self._calls = calls
        self._local = threading.local()
        self.refuses_captures = False
        self.launches = 0
        self.copies = False  # does wrap() give a copy, as a torch that could not use the memory would?

    @property
    def depth(self):
        return getattr(self._local, "depth", 0)

    @property
    def here(self):
        return self._local.here

    def count(self):
        return len(self._calls.visible)

    def uuid(self, index):
        return self._calls.world.uuids[self._calls.visible[index]]

    def memory(self, index):
        with self.on(index):
            return *told(self._calls, "cudaMemGetInfo"), 4096

    @contextmanager
    def on(self, index):
        local = self._local
        before = getattr(local, "here", 0)
        local.here, local.depth = index, self.depth + 1
        try:
            yield
        finally:
            local.here, local.depth = before, local.depth - 1

    @contextmanager
    def stream(self, handle):
        """The current stream of this thread, on every GPU."""
        before = getattr(self._local, "stream", 0)
        self._local.stream = handle
        try:
            yield
        finally:
            self._local.stream = before

    def current(self, index):
        return self.external(getattr(self._local, "stream", 0), index)

    def external(self, handle, index):
        return TorchStream(self._calls, handle, index)

    def wrap(self, memory, index):
        if self.copies:
            return torch.empty(8, dtype=torch.uint8).untyped_storage()
        interface = memory.__cuda_array_interface__
        (size,), (address, readonly) = interface["shape"], interface["data"]
        assert (interface["typestr"], interface["version"], readonly) == ("|u1", 3, False)
        storage = torch.ops.simulated.wrap(address, size, index).untyped_storage()
        weakref.finalize(storage, id, memory).atexit = False  # it lives as long as tensors over it
        return storage

    def captured(self, stream, work):
        if self.refuses_captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        handle, index = stream.cuda_stream, stream.device.index
        steps = self._calls.graphs[handle] = []
        try:
            with self.on(index), self.stream(handle):
                work()
        finally:
            del self._calls.graphs[handle]

        def launch():
            self.launches += 1
            for step in steps:
                self._calls.stream_of(self.current(index).cuda_stream, index).give(step)

        return launch


class TorchCopies:
    """torch's copies to and from GPU 0, which are work of the calling thread's current stream."""

    def __init__(self, calls):
        self._calls, self.casts = calls, 0
        copies_are_done_by(self, 0)

    def current(self):
        if threading.current_thread().name == "simulated stream":  # a kernel, which is the stream's work itself
            return HOST
        handle = self._calls.side.current(0).cuda_stream
        if (steps := self._calls.graphs.get(handle)) is not None:
            return SimpleNamespace(give=steps.append)
        return self._calls.stream_of(handle, 0)

    def kernel(self, work, stream):
        work() if stream is HOST else stream.give(work)

    def follow(self, later, first):
        assert later is HOST
        if first is not HOST:
            first.record().done.wait()

    def settle(self):
        self.current().record().done.wait()


def tensor(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
