"""What a worker does with an arena when a test calls it: `worker.call(attach, handle)`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import time

import shmsync
from shmsync.engine.bind import guard as guards
from shmsync.engine.bind.binding import ModuleCheck
from shmsync.engine.write.writer import Writer
from support.weights import Counting, bytes_of, fill, stamped, stamps

# What a new subscriber gets when the publisher was killed: any publisher that is made then, another test's too, removes
# what was left of the arena.
GONE = (shmsync.WriterDied, shmsync.ArenaNotFound)


def create_and_stall(state, name, slots=1):
    """A publisher in the middle of its first copy."""
    Writer.publish = lambda self, *given, **named: time.sleep(10**6)
    shmsync.Publisher(stamped(1), name=name, slots=slots)


def run_source(state, source):
    with tempfile.TemporaryDirectory() as folder:  # for the files that it makes
        before = os.getcwd()
        os.chdir(folder)
        try:
            exec(compile(source, "a block of the docs", "exec"), {"__name__": "__main__"})
        finally:
            os.chdir(before)


def run_with_stderr(state, source, name, file):
    """Run a program, which knows `name`, and write its stderr into this file."""
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    exec(compile(source, "<string>", "exec"), {"name": name})


def bind_copies(sub, module, guard=True):
    """As schemes bind a module that is on another device than the arena."""
    reader = sub._reader
    return guards.bind(reader, module, guard, ModuleCheck(reader.arena, reader.name, copies=True), clones=True)


def open_arena(state, version=1, *, words=4096, first_version=1, **kwargs):
    """A publisher whose weights are stamped with the version they are published as."""
    state.pub = shmsync.Publisher(stamped(1, words=words), first_version=first_version, **kwargs)
    state.words = words
    for v in range(2, version + 1):
        publish(state, v)
    return state.pub.handle


def fork_a_sleeper(state):
    """A child that lives on without its parent; its pid."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def publish(state, version, **kwargs):
    return state.pub.publish(stamped(version, words=state.words), **kwargs)


def publish_for_ever(state):
    while True:
        state.pub.publish()
        time.sleep(0.001)


def publish_stamps_for_ever(state):
    while True:
        publish(state, state.pub.version + 1)
        time.sleep(0.001)


def open_counting(state, version=1, **kwargs):
    """A publisher whose weights are the number of their version."""
    state.net = Counting()
    state.pub = shmsync.Publisher(state.net, **kwargs)
    while state.pub.version < version:
        count(state)
    return state.pub.handle


def count(state):
    fill(state.net, state.pub.version + 1)
    state.pub.publish()


def count_for_ever(state):
    while True:
        count(state)
        time.sleep(0.0003)


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
    return read(state.sub, **kwargs)


def read(sub, **kwargs):
    """(version, smallest, largest word) of one section."""
    with sub.read(**kwargs) as section:
        return (section.version, *stamps(section.weights))


def tell_versions(state, fails):
    """Bind a module, and keep what on_version() calls with, and what the weights say in that call."""
    state.module, state.told = state.sub.bind(Counting()).requires_grad_(False), []

    def tell(version):
        says = state.sub.weights["first", "bias"], state.sub.state_dict()["last.bias"], state.module(0)
        state.told.append((version, *map(int, says)))
        if version == fails:
            raise OSError(f"version {version} has no place")

    state.sub.on_version(tell)


def call_module(state):
    return int(state.module(0)), state.told


def refresh(state):
    return state.sub.refresh()


def wait_version(state, version, **kwargs):
    return state.sub.wait_version(version, **kwargs)


def collect_versions(state, *, reads, **kwargs):
    """Every version of the loop; with `reads` also the version of a section in its body, and what its weights say."""
    seen = []
    for version in state.sub.versions(**kwargs):
        if reads:
            with state.sub.read() as section:
                seen.append((version, section.version, *stamps(section.weights)))
        else:
            seen.append(version)
    return seen


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


def fill_weights(state, value):
    state.sub.weights["large"].fill_(value)


def unprotect(state):
    """mprotect the pages to writable: (result, errno)."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = state.sub.weights["large"].data_ptr() // 4096 * 4096
    result = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE)
    return result, errno.errorcode.get(ctypes.get_errno())


def bind(state, factory, *args, train=True, **kwargs):
    state.module = state.sub.bind(factory(*args), **kwargs).train(train)
