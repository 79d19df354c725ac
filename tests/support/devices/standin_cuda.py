"""Functions of CUDA and of torch.cuda that need no GPU, and mind CUDA's rules. What is called is recorded.

A World is a machine with GPUs; each Proxy is one process on it. Memory of a GPU is memory of the host, streams are
the threads of simulated.py, which do later what they were asked for. A call that breaks a rule of CUDA gets its error
code; what real drivers do not notice, but is wrong, fails an assertion.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import mmap
import random
import threading
from collections import Counter

from shmsync._native import is_watched
from shmsync.memory.cuda.gpu import Gpu
from support.devices.standin_torch import StandInTorch, TorchCopies
from support.devices.streams import Event, Stream, on_a_drivers_thread

BLOCK = 2 << 20
MEMORY = 1 << 28  # of each GPU
GIVE_BACK = {
    "cudaFree",
    "cudaFreeHost",
    "cudaHostUnregister",
    "cudaStreamDestroy",
    "cudaIpcCloseMemHandle",
    "restore",
}
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


def recorded(*nothing):
    """A call of CUDA that is noted under its name. When it fails it does nothing, and gives its code and `nothing`."""

    def decorate(function):
        @functools.wraps(function)
        def call(self, *arguments):
            code = self._called(function.__name__, *arguments)
            return (code, *nothing) if code else function(self, *arguments)

        return call

    return decorate


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
        self._copies = TorchCopies(self)
        self.fail_at, self.code = fail_at, code
        self.log = []  # (name, arguments)
        self.last_error = 0
        self.failed = None  # for the threads of streams
        self.longest = 0.0005
        self.behind_half = lambda: None  # what a stream does behind each half of a copy
        self._handles = itertools.count(0x7000)
        self.allocations = {}  # address: (GPU, size, memory)
        self._small = {}  # GPU: what is left of a block that small allocations share
        self.hosted = {}
        self.registered = {}  # address: (size, flags)
        self.graphs = {}  # handles of streams that torch captures: what they were given
        self.streams = {}
        self.mappings = {}  # address: memory of another process
        self.users = Counter()  # of each
        self.capturing = set()  # handles of streams
        self.modes = threading.local()
        self._defaults = {}

    # How a test looks at it.

    def names(self):
        return [name for name, _ in self.log if name not in TALK and name not in ("relax", "restore")]

    def left(self):
        """What was made and not given back."""
        made = Counter(
            memory=len(self.allocations),
            host=len(self.hosted) + len(self.registered),
            streams=len(self.streams),
            mappings=len(self.mappings),
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

    def give(self, handle, work):
        """Work for a stream, or for the graph that it is captured for."""
        self.graphs[handle].append(work) if handle in self.graphs else self.stream_of(handle).give(work)

    def kernel(self, work, handle=None):
        """Work of the user for a stream, by default the current one of GPU 0."""
        with self.side.on(0):
            self.stream_of(self.side.current(0).cuda_stream if handle is None else handle).give(work)

    # The calls.

    def _called(self, name, *arguments):
        self.log.append((name, arguments))
        if name in TALK:
            return 0
        if name.startswith("cuda"):
            self.modes.context = True
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

    @recorded(None)
    def relax(self):
        before, self.modes.relaxed = getattr(self.modes, "relaxed", False), True
        return Code(0), before

    def restore(self, mode):
        self._called("restore", mode)
        assert isinstance(mode, bool)
        self.modes.relaxed = mode
        return Code(0), True

    @recorded(None, None)
    def cudaMemGetInfo(self):
        used = sum(size for gpu, size, _ in self.allocations.values() if gpu == self.side.here)
        return Code(0), MEMORY - used, MEMORY

    @recorded(None)
    def cudaMalloc(self, size):
        gpu = self.side.here
        if size % BLOCK == 0:
            memory = _Memory(size)
            address = memory.address
        else:  # cut out of a block that others share
            memory, at = self._small.get(gpu) or (_Memory(BLOCK), 512)
            address = memory.address + at
            self._small[gpu] = (memory, at + -(-size // 512) * 512)
        self.allocations[address] = (gpu, size, memory)
        return Code(0), address

    def _synchronize(self):
        """Both frees wait for the device, with real drivers too."""
        for _, stream in list(self.streams.values()):
            stream.record().done.wait()
        for stream in list(self._defaults.values()):
            stream.record().done.wait()

    @recorded()
    def cudaFree(self, address):
        self._synchronize()
        if address not in self.allocations:
            return (self._wrong(1),)
        memory = self.allocations.pop(address)[2]
        for handle, (shared, _) in list(self.world.exported.items()):
            if shared is memory:
                del self.world.exported[handle]
        return (Code(0),)

    @recorded(None)
    def cudaHostAlloc(self, size, flags):
        memory = _Memory(size)
        self.hosted[memory.address] = memory
        return Code(0), memory.address

    @recorded()
    def cudaFreeHost(self, address):
        self._synchronize()
        del self.hosted[address]
        return (Code(0),)

    @recorded()
    def cudaHostRegister(self, address, size, flags):
        if address in self.registered:
            return (self._wrong(712),)
        self.registered[address] = size, flags
        return (Code(0),)

    @recorded()
    def cudaHostUnregister(self, address):
        del self.registered[address]
        return (Code(0),)

    @recorded(b"")
    def cudaIpcGetMemHandle(self, address):
        if address not in self.allocations:
            return self._wrong(1), b""
        memory = self.allocations[address][2]
        for handle, (shared, _) in self.world.exported.items():
            if shared is memory:
                return Code(0), handle
        handle = next(self.world.numbers).to_bytes(64, "little")
        self.world.exported[handle] = memory, self.pid
        return Code(0), handle

    @recorded(0)
    def cudaIpcOpenMemHandle(self, handle):
        memory, pid = self.world.exported.get(handle, (None, None))
        if memory is None:
            return self._wrong(1), 0
        if pid == self.pid:
            return self._wrong(201), 0  # CUDA does not open its own
        self.mappings[memory.address] = memory
        self.users[memory.address] += 1
        return Code(0), memory.address  # the whole block's beginning

    @recorded()
    def cudaIpcCloseMemHandle(self, address):
        self.users[address] -= 1
        if not self.users[address]:
            del self.mappings[address]
        return (Code(0),)

    @recorded(None)
    def cudaStreamCreateWithFlags(self, flags):
        assert flags == 1, "the stream would wait for the default stream"
        handle = next(self._handles)
        self.streams[handle] = self.side.here, Stream(self, handle)
        return Code(0), handle

    @recorded()
    def cudaStreamDestroy(self, stream):
        del self.streams[stream]
        return (Code(0),)

    @recorded(False)
    def cudaStreamQuery(self, stream):
        return Code(0), self.stream_of(stream).idle

    @recorded(None)
    def cudaStreamIsCapturing(self, stream):
        return Code(0), int(stream in self.capturing)

    @recorded(None)
    def cudaEventRecord(self, stream):
        if stream and self.side.here != self.streams[stream][0]:
            return self._wrong(400), None
        if stream in self.capturing:
            return Code(0), Event()  # recorded into the graph
        return Code(0), self.stream_of(stream).record()

    @recorded()
    def cudaStreamWaitEvent(self, stream, event):
        if stream in self.capturing:
            return (self._wrong(905),)
        self.stream_of(stream).give(lambda: event.done.wait() and None)
        return (Code(0),)

    @recorded(False)
    def cudaEventQuery(self, event):
        return Code(0), event.done.is_set()

    def _place(self, address, size):
        """Does this lie in memory that a stream of this process may copy?"""
        known = [(base, each[1]) for base, each in self.allocations.items()]
        known += [(base, memory.size) for base, memory in (*self.hosted.items(), *self.mappings.items())]
        known += [(base, whole) for base, (whole, _) in self.registered.items()]
        if any(base <= address and address + size <= base + whole for base, whole in known):
            return True
        ended = any(memory.address <= address < memory.address + memory.size for memory in _kept)
        return not ended and not is_watched(address)  # else it is torch's

    @recorded()
    def cudaMemcpyAsync(self, to, source, size, stream):
        if not (self._place(to, size) and self._place(source, size)):
            return (self._wrong(1),)
        half = size // 2
        for at, many in ((0, half), (half, size - half)):
            self.give(stream, lambda at=at, many=many: ctypes.memmove(to + at, source + at, many) and None)
            self.give(stream, lambda: self.behind_half())
        return (Code(0),)

    @recorded()
    def cuLaunchHostFunc(self, stream, function, ticket):
        if not getattr(self.modes, "context", False):
            return (Code(201),)  # of the driver, which makes no context for a thread as the runtime does
        self.stream_of(stream).give(lambda: on_a_drivers_thread(function, ticket))
        return (Code(0),)


def gpu(world=None, index=0, **options):
    calls = Proxy(world or World(), **options)
    return Gpu(index, calls, calls.side)


def two_processes():
    """The GPU of a world, as a trainer has it, and a worker."""
    world = World()
    return gpu(world), gpu(world)


def left(device):
    """What a process still has of CUDA when its garbage is gone."""
    gc.collect()
    return device._calls.left()
