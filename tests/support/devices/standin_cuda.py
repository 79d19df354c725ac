"""Functions of CUDA and of torch.cuda that need no GPU, and mind CUDA's rules. What is called is recorded.

A World is a machine with GPUs; each StandIn is one process on it. Memory of a GPU is memory of the host, streams are
the threads of simulated.py, which do later what they were asked for. Who breaks a rule of CUDA gets its error
code; what real drivers do not notice, but is wrong, fails an assertion.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from support.devices.simulated import Event, Stream, on_a_drivers_thread

BLOCK = 2 << 20
MEMORY = 1 << 28  # of each GPU
GIVE_BACK = {"cudaFree", "cudaFreeHost", "cudaStreamDestroy", "cudaEventDestroy", "cudaIpcCloseMemHandle", "restore"}
TALK = {"cudaGetLastError", "cudaGetErrorString"}


class Code(int):
    """An error code, with a name as those of the bindings have."""

    @property
    def name(self):
        return f"cudaError{int(self)}"


class World:
    """A machine. `uuids`: its GPUs'."""

    def __init__(self, gpus=1):
        self.uuids = [bytes([10 + n]) * 16 for n in range(gpus)]
        self.exported = {}  # handle: (allocation's block, pid)
        self.numbers = itertools.count(1)


_kept = []  # all of them


class _Memory:
    """Pages that stay, so that a copy after their end is an error that is seen, and no crash."""

    def __init__(self, size):
        _kept.append(self)
        self.size = size
        self.pages = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))


class Proxy:
    """The calls of one process, see CudaCalls in shmsync/memory/cuda/calls.py.

    Args:
        world: the machine.
        visible: which of its GPUs the process sees, in its own order.
        fail_at: the number of the call that fails, with `code`; after it all of them if the code is one that stays.
    """

    def __init__(self, world, visible=(0,), *, fail_at=None, code=999):
        self.world, self.visible = world, list(visible)
        self.pid = next(world.numbers)
        self.side = StandInTorch(self)
        self.fail_at, self.code = fail_at, code
        self.log = []  # (name, arguments)
        self.last_error = 0
        self.failed = None  # for the threads of streams
        self.longest = 0.0005
        self._handles = itertools.count(0x7000)
        self.allocations = {}  # address: (GPU, size, memory)
        self._small = {}  # GPU: what is left of a block that small allocations share
        self.hosted = {}
        self.streams = {}
        self.events = {}  # handle: [GPU, Event or None]
        self.mappings = {}  # address: [users, handle]
        self.capturing = set()  # handles of streams
        self.modes = threading.local()
        self._defaults = {}

    # How a test looks at it.

    def names(self):
        return [name for name, _ in self.log if name not in TALK and name not in ("relax", "restore")]

    def left(self):
        """What was made and not given back; events are kept for the next time."""
        made = Counter(
            memory=len(self.allocations), host=len(self.hosted), streams=len(self.streams), mappings=len(self.mappings)
        )
        return +made

    def delay(self, chance: random.Random):
        if chance.random() < 0.2:
            threading.Event().wait(chance.random() * self.longest)

    def stream_of(self, handle, gpu=None):
        """The thread of a stream."""
        if handle == 0:
            gpu = self.side.here if gpu is None else gpu
            if gpu not in self._defaults:
                self._defaults[gpu] = Stream(self, gpu)
            return self._defaults[gpu]
        return self.streams[handle][1]

    def kernel(self, work, handle=None):
        """Work of the user for a stream, by default the current one of GPU 0."""
        with self.side.on(0):
            self.stream_of(self.side.current(0) if handle is None else handle).give(work)

    # The calls.

    def _called(self, name, *arguments):
        self.log.append((name, arguments))
        if name in TALK:
            return 0
        assert self.side.depth, f"{name} without the right GPU as the current one"
        if name not in ("relax", "restore", *GIVE_BACK):  # these also where relax() was refused
            assert getattr(self.modes, "relaxed", False), f"{name} would spoil a capture in another thread"
        counted = sum(each not in TALK for each, _ in self.log) - 1
        stays = 700 <= self.code < 720
        hit = self.fail_at is not None and (counted == self.fail_at or (stays and counted > self.fail_at))
        if hit and name != "restore":
            if 700 <= self.code < 720:
                self.failed = RuntimeError("an error that stays")
            self.last_error = self.code
        else:
            hit = False
        return Code(self.code if hit else 0)

    def _wrong(self, code):
        self.last_error = code
        return Code(code)

    def cudaGetErrorString(self, code):
        self._called("cudaGetErrorString", code)
        return Code(0), b"words of the proxy"

    def cudaGetLastError(self):
        self._called("cudaGetLastError")
        last, self.last_error = self.last_error, 0
        return (Code(last),)

    def cudaGetDeviceProperties(self, device):
        self.log.append(("cudaGetDeviceProperties", (device,)))  # needs no current device, and makes no context
        counted = sum(each not in TALK for each, _ in self.log) - 1
        if self.fail_at == counted:
            return self._wrong(self.code), None
        return Code(0), SimpleNamespace(uuid=SimpleNamespace(bytes=self.world.uuids[self.visible[device]]))

    def relax(self):
        code = self._called("relax")
        if code:
            return code, None
        before, self.modes.relaxed = getattr(self.modes, "relaxed", False), True
        return code, before

    def restore(self, mode):
        self._called("restore", mode)
        assert isinstance(mode, bool)
        self.modes.relaxed = mode
        return Code(0), True

    def cudaMemGetInfo(self):
        code = self._called("cudaMemGetInfo")
        used = sum(size for gpu, size, _ in self.allocations.values() if gpu == self.side.here)
        return (code, None, None) if code else (code, MEMORY - used, MEMORY)

    def cudaMalloc(self, size):
        code = self._called("cudaMalloc", size)
        if code:
            return code, None
        gpu = self.side.here
        if size % BLOCK == 0:
            memory = _Memory(size)
            address = memory.address
        else:  # cut out of a block that others share
            memory, at = self._small.get(gpu) or (_Memory(BLOCK), 512)
            address = memory.address + at
            self._small[gpu] = (memory, at + -(-size // 512) * 512)
        self.allocations[address] = (gpu, size, memory)
        return code, address

    def _synchronize(self):
        """Both frees wait for the device, with real drivers too."""
        for _, stream in list(self.streams.values()):
            stream.record().done.wait()
        for stream in list(self._defaults.values()):
            stream.record().done.wait()

    def cudaFree(self, address):
        code = self._called("cudaFree", address)
        if code:
            return (code,)
        self._synchronize()
        if address not in self.allocations:
            return (self._wrong(1),)
        memory = self.allocations.pop(address)[2]
        for handle, (shared, _) in list(self.world.exported.items()):
            if shared is memory:
                del self.world.exported[handle]
        return (code,)

    def cudaHostAlloc(self, size, flags):
        code = self._called("cudaHostAlloc", size, flags)
        if code:
            return code, None
        memory = _Memory(size)
        self.hosted[memory.address] = memory
        return code, memory.address

    def cudaFreeHost(self, address):
        code = self._called("cudaFreeHost", address)
        if not code:
            self._synchronize()
            del self.hosted[address]
        return (code,)

    def cudaIpcGetMemHandle(self, address):
        code = self._called("cudaIpcGetMemHandle", address)
        if code:
            return code, b""
        if address not in self.allocations:
            return self._wrong(1), b""
        memory = self.allocations[address][2]
        for handle, (shared, _) in self.world.exported.items():
            if shared is memory:
                return code, handle
        handle = next(self.world.numbers).to_bytes(64, "little")
        self.world.exported[handle] = memory, self.pid
        return code, handle

    def cudaIpcOpenMemHandle(self, handle):
        code = self._called("cudaIpcOpenMemHandle", handle)
        if code:
            return code, 0
        memory, pid = self.world.exported.get(handle, (None, None))
        if memory is None:
            return self._wrong(1), 0
        if pid == self.pid:
            return self._wrong(201), 0  # CUDA does not open its own
        if memory.address in self.mappings:
            return self._wrong(208), 0
        self.mappings[memory.address] = memory
        return code, memory.address  # the whole block's beginning

    def cudaIpcCloseMemHandle(self, address):
        code = self._called("cudaIpcCloseMemHandle", address)
        if not code:
            del self.mappings[address]
        return (code,)

    def cudaStreamCreateWithFlags(self, flags):
        code = self._called("cudaStreamCreateWithFlags", flags)
        if code:
            return code, None
        assert flags == 1, "the stream would wait for the default stream"
        handle = next(self._handles)
        self.streams[handle] = self.side.here, Stream(self, handle)
        return code, handle

    def cudaStreamDestroy(self, stream):
        code = self._called("cudaStreamDestroy", stream)
        if not code:
            del self.streams[stream]
        return (code,)

    def cudaStreamQuery(self, stream):
        return (self._called("cudaStreamQuery", stream),)

    def cudaStreamIsCapturing(self, stream):
        code = self._called("cudaStreamIsCapturing", stream)
        return (code, None) if code else (code, int(stream in self.capturing))

    def cudaEventCreateWithFlags(self, flags):
        code = self._called("cudaEventCreateWithFlags", flags)
        if code:
            return code, None
        handle = next(self._handles)
        self.events[handle] = [self.side.here, None]
        return code, handle

    def cudaEventDestroy(self, event):
        code = self._called("cudaEventDestroy", event)
        if not code:
            del self.events[event]
        return (code,)

    def _gpu_of(self, stream):
        return self.side.here if stream == 0 else self.streams[stream][0]

    def cudaEventRecord(self, event, stream):
        code = self._called("cudaEventRecord", event, stream)
        if code:
            return (code,)
        if not self.side.here == self._gpu_of(stream) == self.events[event][0]:
            return (self._wrong(400),)
        if stream in self.capturing:
            return (code,)  # recorded into the graph
        self.events[event][1] = self.stream_of(stream).record()
        return (code,)

    def cudaStreamWaitEvent(self, stream, event, flags):
        code = self._called("cudaStreamWaitEvent", stream, event, flags)
        if not code:
            if stream in self.capturing:
                return (self._wrong(905),)
            recorded: Event = self.events[event][1]
            self.stream_of(stream).give(lambda: recorded.done.wait() and None)
        return (code,)

    def cudaEventQuery(self, event):
        code = self._called("cudaEventQuery", event)
        return (code,) if code or self.events[event][1].done.is_set() else (Code(600),)

    def _place(self, address, size):
        """Does this lie in memory that a stream of this process may copy?"""
        known = [(base, each[1]) for base, each in self.allocations.items()]
        known += [(base, memory.size) for base, memory in (*self.hosted.items(), *self.mappings.items())]
        return any(base <= address and address + size <= base + whole for base, whole in known)

    def cudaMemcpyAsync(self, to, source, size, stream):
        code = self._called("cudaMemcpyAsync", to, source, size, stream)
        if code:
            return (code,)
        if not (self._place(to, size) and self._place(source, size)):
            return (self._wrong(1),)
        half = size // 2
        for at, many in ((0, half), (half, size - half)):
            self.stream_of(stream).give(lambda at=at, many=many: ctypes.memmove(to + at, source + at, many) and None)
        return (code,)

    def cuLaunchHostFunc(self, stream, function, ticket):
        code = self._called("cuLaunchHostFunc", stream, function)
        if not code:
            self.stream_of(stream).give(lambda: on_a_drivers_thread(function, ticket))
        return (code,)


class StandInTorch:
    """What is asked of torch, see TorchSide in shmsync/memory/cuda/calls.py."""

    def __init__(self, calls):
        self._calls = calls
        self._local = threading.local()
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
        array: Any = (ctypes.c_uint8 * size).from_address(address)
        array.keep = memory
        return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()

    def index_of(self, tensor):
        address = tensor.data_ptr()
        for base, (gpu, size, _) in self._calls.allocations.items():
            if base <= address < base + size:
                return gpu
        return None

    def cached(self, index):
        return 4096


def torch_stream(handle, index=0):
    """As torch.cuda.Stream shows itself."""
    return SimpleNamespace(cuda_stream=handle, device=SimpleNamespace(index=index))


def torch_event(handle, index=0):
    """As torch.cuda.Event shows itself."""
    return SimpleNamespace(cuda_event=handle, device=SimpleNamespace(index=index))
