"""What shmsync asks of torch for memory of a GPU, beside the proxy for CUDA (standin_cuda.py)."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from support.devices.simulated import copies_are_done_by
from support.devices.streams import HOST


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
        return getattr(self._local, "stream", 0)

    def wrap(self, memory, index):
        if self.copies:
            return torch.empty(8, dtype=torch.uint8).untyped_storage()
        interface = memory.__cuda_array_interface__
        (size,), (address, readonly) = interface["shape"], interface["data"]
        assert (interface["typestr"], interface["version"], readonly) == ("|u1", 3, False)
        storage = torch.ops.simulated.wrap(address, size, index).untyped_storage()
        weakref.finalize(storage, id, memory).atexit = False  # it lives as long as tensors over it
        return storage

    def captured(self, index, stream, work):
        if self.refuses_captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        steps = self._calls.graphs[stream] = []
        try:
            with self.on(index), self.stream(stream):
                work()
        finally:
            del self._calls.graphs[stream]

        def launch():
            self.launches += 1
            for step in steps:
                self._calls.stream_of(self.current(index), index).give(step)

        return launch

    def cached(self, index):
        return 4096


class TorchCopies:
    """torch's copies to and from GPU 0, which are work of the calling thread's current stream."""

    def __init__(self, calls):
        self._calls, self.casts = calls, 0
        copies_are_done_by(self, 0)

    def current(self):
        if threading.current_thread().name == "simulated stream":  # a kernel, which is the stream's work itself
            return HOST
        handle = self._calls.side.current(0)
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


def torch_stream(handle, index=0):
    """As torch.cuda.Stream shows itself."""
    return SimpleNamespace(cuda_stream=handle, device=SimpleNamespace(index=index))


def torch_event(handle, index=0):
    """As torch.cuda.Event shows itself."""
    return SimpleNamespace(cuda_event=handle, device=SimpleNamespace(index=index))


def tensor(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
