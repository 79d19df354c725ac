"""What the worker processes of these tests do, and the object that drives one of them.

A worker serves calls: `worker.call(function, *args)` runs `function(state, *args)` there, with a `state` that
lasts as long as the worker. So a test reads in the order in which things happen, across processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import mmap
import os
import pickle
import re
import resource
import signal
import struct
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import shmsync
from shmsync import _native

# ---- driving a worker


class Gone(Exception):
    """The worker died instead of answering."""

    def __init__(self, exitcode):
        super().__init__(f"the worker died with exit code {exitcode}")
        self.exitcode = exitcode


class RemoteTraceback(Exception):
    def __str__(self):
        return "\n" + self.args[0]


class Worker:
    def __init__(self, context, between=None):
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, between), daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid
        self.busy = False

    def start(self, function, *args, **kwargs):
        """Run it there; do not wait."""
        self.busy = True
        self.conn.send((function, args, kwargs))

    def result(self):
        """What the call started last returned. Raises what it raised."""
        try:
            ok, value, trace = self.conn.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise Gone(self.process.exitcode) from None
        self.busy = False
        if not ok:
            raise value from RemoteTraceback(trace)
        return value

    def call(self, function, *args, **kwargs):
        self.start(function, *args, **kwargs)
        return self.result()

    def interrupt(self, function, *args, **kwargs):
        """End a call that runs until the next one; what it returned. What the next one returns is dropped."""
        self.conn.send((function, args, kwargs))
        value = self.result()
        self.result()
        return value

    def done(self):
        return self.conn.poll()

    def kill(self):
        """SIGKILL, and wait until it is dead."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def stop(self):
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self):
        os.kill(self.pid, signal.SIGCONT)

    def finish(self):
        """Let it run to its normal end; its exit code."""
        self.conn.send(None)
        self.process.join()
        return self.process.exitcode

    def end(self):
        """At the end of a test, whatever state it is in."""
        if self.process.is_alive() and not self.busy:
            self.resume()
            with contextlib.suppress(BrokenPipeError):
                self.conn.send(None)
            self.process.join(60)
        if self.process.is_alive():
            self.kill()
        self.process.join()
        self.conn.close()


@contextlib.contextmanager
def pool(context):
    made = []

    def make(count=None):
        new = [Worker(context) for _ in range(1 if count is None else count)]
        made.extend(new)
        return new[0] if count is None else new

    try:
        yield make
    finally:
        for worker in made:
            worker.end()


def serve(conn, between=None):
    """Answer calls; before each, and while there is none, `between(state)` may do something of its own."""
    torch.set_num_threads(1)
    state = SimpleNamespace(sub=None, pub=None, conn=conn)
    while True:
        if between is not None:
            between(state)
        try:
            call = conn.recv()
        except EOFError:
            return
        if call is None:
            return
        function, args, kwargs = call
        try:
            answer = (True, function(state, *args, **kwargs), None)
        except BaseException as error:
            trace = traceback.format_exc()
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                error = RuntimeError(f"{type(error).__name__}: {error}")
            answer = (False, error, trace)
        conn.send(answer)


def until(condition):
    """Wait for it; the test's watchdog is the limit."""
    while not condition():
        time.sleep(0.002)


class Call(threading.Thread):
    """A call in a thread of this process: `Call(pub.publish, ...)`, then `.result()`."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self._call = (function, args, kwargs)
        self._value = self._error = None
        self.start()

    def run(self):
        function, args, kwargs = self._call
        try:
            self._value = function(*args, **kwargs)
        except BaseException as error:
            self._error = error

    def result(self):
        self.join()
        if self._error is not None:
            raise self._error
        return self._value


def in_forked_child(function):
    """(exit status, what function() returned) in a fork of this process, which ends without any clean-up."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()  # dying is what some children are for
            os.close(ours)
            os.write(theirs, pickle.dumps(function()))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), pickle.loads(text) if text else None


def outcome(function, *args, **kwargs):
    """The name of what it raises, or "returned"."""
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return type(error).__name__
    return "returned"


# ---- weights that tell their version


def stamped(version, *, words=4096):
    """Weights with one value in every word of every leaf."""
    return {
        "large": torch.full((words // 2,), version),
        "layer.weight": torch.full((words // 32, 8), version),
        "layer.bias": torch.full((words // 4,), version),
        "scalar": torch.tensor(version),
    }


def stamp(weights, version):
    """Fill it in place."""
    for leaf in leaves(weights):
        leaf.fill_(version)


def leaves(weights):
    return weights.values() if isinstance(weights, dict) else weights.values(True, True)


def stamps(weights):
    """(smallest, largest) word over all leaves: equal when the weights are of one version."""
    low, high = zip(*(torch.aminmax(leaf) for leaf in leaves(weights)), strict=True)
    return int(min(low)), int(max(high))


def bytes_of(weights):
    flat = (leaf.contiguous().view(-1).view(torch.uint8) for leaf in leaves(weights))
    return b"".join(leaf.numpy().tobytes() for leaf in flat)


# ---- a worker as publisher


def create_and_stall(state, name):
    """A publisher in the middle of its first copy."""
    from shmsync import publisher

    publisher.Publisher.publish = lambda self: time.sleep(10**6)
    shmsync.Publisher(stamped(1), name=name)


def run_source(state, source):
    exec(compile(source, "a block of the docs", "exec"), {"__name__": "__main__"})


def open_arena(state, version=1, *, words=4096, **kwargs):
    """A publisher whose weights are stamped with the version they are published as."""
    state.pub = shmsync.Publisher(stamped(1, words=words), **kwargs)
    state.words = words
    for v in range(2, version + 1):
        publish(state, v)
    return state.pub.handle


def publish(state, version, **kwargs):
    return state.pub.publish(stamped(version, words=state.words), **kwargs)


def begin_update(state, version):
    """Enter update(), write one of the leaves, and stay in it."""
    state.update = state.pub.update()
    weights = state.update.__enter__()
    weights["large"].fill_(version)


def close_publisher(state, *, keep=False):
    state.pub.close()
    if not keep:
        state.pub = None


# ---- a worker as subscriber


def attach(state, handle, **kwargs):
    state.sub = shmsync.Subscriber(handle, **kwargs)
    return state.sub.version


def detach(state, *, keep=False):
    state.module = state.section = None
    if state.sub is not None:
        state.sub.close()
    if not keep:
        state.sub = None


def enter(state, **kwargs):
    """Enter a section and stay in it."""
    state.section = state.sub.read(**kwargs)
    state.section.__enter__()
    return state.section.version


def leave(state):
    state.section.__exit__(None, None, None)
    return state.section.torn


def look(state, **kwargs):
    """(version, smallest, largest word) of one section."""
    with state.sub.read(**kwargs) as section:
        return (section.version, *stamps(section.weights))


def refresh(state):
    return state.sub.refresh()


def wait_version(state, version, **kwargs):
    return state.sub.wait_version(version, **kwargs)


def apply_until(state, version):
    """Apply version after version until this one."""
    while state.sub.version < version:
        state.sub.refresh()
        time.sleep(0.001)
    return state.sub.version


def read_for_ever(state):
    while True:
        with state.sub.read() as section:
            low, high = stamps(section.weights)
            assert low == high == section.version


def read_digest(state):
    """The bytes of all leaves."""
    with state.sub.read() as section:
        return bytes_of(section.weights)


def attach_and_tell(handle, conn):
    """A process of its own, with the handle among its arguments."""
    with shmsync.attach(handle) as sub, sub.read() as section:
        conn.send((section.version, int(section.weights["scalar"])))


# ---- never torn


def read_until(state, reads, versions):
    """Read until so many sections and versions were accepted: (accepted, versions, torn ones among them)."""
    sub = state.sub
    seen, accepted, torn, last = set(), 0, [], 0

    def check():
        return (sub.version, *stamps(sub.weights))

    while accepted < reads or len(seen) < versions:
        if accepted % 4 == 3:  # a plain section, which says itself whether it may be accepted
            with sub.read() as section:
                found = (section.version, *stamps(section.weights))
            if section.torn:
                found = sub.run(check)
        else:
            found = sub.run(check)
        version, low, high = found
        if not low == high == version:
            torn.append(found)
        assert version >= last, f"version {version} after {last}"
        last = version
        accepted += 1
        seen.add(version)
    return accepted, len(seen), torn


def read_until_torn(state):
    """Sections until one shows two versions at once; how many that took."""
    sections = 0
    while True:
        sections += 1
        with state.sub.read() as section:
            low, high = stamps(section.weights)
        if low != high:
            return sections


# ---- garbage in the reader table


def segment_path(name):
    return Path(f"/dev/shm/shmsync.{name}")


ROW = 128  # bytes; native/include/shmsync/layout.hpp
OWNER, PIN, ACKED, WANT = 0, 8, 16, 24


def rows_offset(identity):
    end = identity["manifest_offset"] + identity["manifest_bytes"]
    return (end + 65535) // 65536 * 65536


def write_row(state, offset, content, row=None):
    """Overwrite bytes of a reader row (this worker's own) as a stray pointer would."""
    fd = os.open(segment_path(state.sub.name), os.O_RDWR)
    try:
        start = rows_offset(_native.read_identity(fd)) + ROW * (state.sub._row if row is None else row)
        os.pwrite(fd, content, start + offset)
    finally:
        os.close(fd)


def word(value):
    return struct.pack("<Q", value)


# ---- damage


def fill_weights(state):
    state.sub.weights["large"].fill_(666)


def write_through_numpy(state):
    state.sub.weights["large"].numpy()[0] = 666


def write_bound_parameter(state):
    with torch.no_grad():
        next(state.module.parameters()).add_(1)


def unprotect(state):
    """mprotect the pages to writable: (result, errno)."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = state.sub.weights["large"].data_ptr() // 4096 * 4096
    result = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE)
    return result, errno.errorcode.get(ctypes.get_errno())


def slab_fds(pid="self"):
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if "memfd:shmsync" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                found.append(int(fd))
        except FileNotFoundError:
            pass
    return found


def slab_inodes(pid):
    return {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for fd in slab_fds(pid)}


def holders(inode):
    """Processes that map this memfd, or have it open."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            maps = Path(f"/proc/{entry}/maps").read_text()
            if re.search(rf" {inode} +/memfd:shmsync", maps) or inode in slab_inodes(entry):
                found.add(int(entry))
        except (OSError, ValueError):
            pass
    return found


def break_in(state):
    """Try every way back to a writable slab, or to a shorter one. What each came to: an errno, or "done"."""
    libc = ctypes.CDLL(None, use_errno=True)
    results = {}

    def attempt(what, function):
        try:
            function()
        except OSError as error:
            results[what] = errno.errorcode.get(error.errno, str(error.errno))
        else:
            results[what] = "done"

    def punch(fd):
        if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096)) != 0:  # PUNCH_HOLE | KEEP_SIZE
            raise OSError(ctypes.get_errno(), "fallocate")

    def through_mem():
        fd = os.open("/proc/self/mem", os.O_RDWR)
        try:
            os.pwrite(fd, b"\xff" * 8, state.sub.weights["large"].data_ptr())
        finally:
            os.close(fd)

    for kept in slab_fds():
        size = os.fstat(kept).st_size
        attempt("map its descriptor", lambda: mmap.mmap(kept, size))  # noqa: B023
        try:
            fd = os.open(f"/proc/self/fd/{kept}", os.O_RDWR)
        except OSError as error:
            results["open it writable"] = errno.errorcode[error.errno]
            continue
        attempt("map it again", lambda: mmap.mmap(fd, size))  # noqa: B023
        attempt("write to it", lambda: os.pwrite(fd, b"\xff" * 8, 0))  # noqa: B023
        attempt("truncate it", lambda: os.ftruncate(fd, 4096))  # noqa: B023
        attempt("grow it", lambda: os.ftruncate(fd, size + 4096))  # noqa: B023
        attempt("punch a hole", lambda: punch(fd))  # noqa: B023
        os.close(fd)
    attempt("write through /proc/self/mem", through_mem)
    return results


# ---- modules


class Net(nn.Sequential):
    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


class Scaled(nn.Module):
    """Returns views of its own weights, as policies that store an action scale do."""

    def __init__(self, value):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), float(value)))
        self.register_buffer("shift", torch.full((4,), float(value)))

    def forward(self, kind):
        if kind == "tensor":
            return self.scale[1:3]
        if kind == "nested":
            return {"out": (torch.zeros(2), [self.scale.view(2, 2)]), "shift": self.shift}
        return self.scale


def bind(state, factory, *args, train=True, **kwargs):
    state.module = state.sub.bind(factory(*args), **kwargs).train(train)


def forward(state, *args):
    """Run the bound module and keep its output."""
    with torch.no_grad():
        state.out = state.module(*[torch.tensor(a) if isinstance(a, list) else a for a in args])
    return output(state)


def output(state):
    """The output kept by forward(), as plain lists."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value]

    return plain(state.out)


def buffer(state, key):
    return state.module.get_buffer(key).tolist()


# ---- what a process holds


def limit_descriptors(state, count):
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def open_many(state, tensors):
    state.words = None
    state.pub = shmsync.Publisher({f"block{i % 50}.w{i}": torch.full((16,), 1) for i in range(tensors)})
    return state.pub.handle


def update_all(state, version):
    with state.pub.update() as weights:
        stamp(weights, version)
    return len(os.listdir("/proc/self/fd"))


def open_untouched(state, nbytes, **kwargs):
    """A publisher whose source takes no memory: pages never written are all the one page of zeros."""
    state.pub = shmsync.Publisher({"w": torch.empty(nbytes, dtype=torch.uint8)}, **kwargs)
    with state.pub.update() as weights:
        weights["w"].fill_(7)
    return state.pub.handle


def touch_all(state):
    """Read one byte of every page; their sum."""
    weights = state.pub.weights if state.sub is None else state.sub.weights
    return int(weights["w"][::4096].sum())


def pss(pid):
    """Bytes, with shared pages split among those who map them."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+) kB", text, re.M)[1]) * 1024


def holdings(state):
    """Descriptors, threads, slab mappings and /dev/shm entries of this process."""
    gc.collect()
    prefix = f"shmsync.{os.getpid()}-"
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            descriptors.append(os.readlink(f"/proc/self/fd/{fd}"))
    return {
        "descriptors": sorted(descriptors),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": Path("/proc/self/maps").read_text().count("shmsync."),
        "slabs": Path("/proc/self/maps").read_text().count("memfd:shmsync"),
        "segments": sorted(entry for entry in os.listdir("/dev/shm") if entry.startswith(prefix)),
    }


def live_whole_life(state):
    """Publisher and subscriber of one arena in this process, used in every way, then closed."""
    net = Net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with shmsync.Publisher(net) as pub, shmsync.Subscriber(pub.handle, worker=0) as sub:
        module = sub.bind(Net(1))
        with torch.no_grad():
            module(torch.zeros(2, 6))
        pub.adopt(net, optimizer)
        net(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        pub.publish(wait=None)
        sub.snapshot()
        pub.readers()
        sub.refresh()
    with shmsync.Publisher(stamped(1), slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        pub.publish()
        sub.refresh()
