"""What a worker does with an arena when a test calls it: `worker.call(attach, handle)`."""

from __future__ import annotations

import os
import tempfile

import shmsync
from shmsync.engine.bind import guard as guards
from shmsync.engine.bind.guarded_methods import calls_of
from support.weights import Counting, fill, stamped, stamps

# What a new subscriber gets when the publisher was killed: any publisher that is made then, another test's too, removes
# what was left of the arena.
GONE = (shmsync.WriterDied, shmsync.ArenaNotFound)


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
    return guards.bind(sub._reader, module, calls_of(module) if guard else [], copies=True)


def open_arena(state, version=1, *, words=4096, first_version=1, **kwargs):
    """A publisher whose weights are stamped with the version they are published as."""
    state.pub = shmsync.Publisher(stamped(1, words=words), first_version=first_version, **kwargs)
    state.words = words
    for v in range(2, version + 1):
        publish(state, v)
    return state.pub.handle


def publish(state, version, **kwargs):
    return state.pub.publish(stamped(version, words=state.words), **kwargs)


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


def refresh(state):
    return state.sub.refresh()


def wait_version(state, version, **kwargs):
    return state.sub.wait_version(version, **kwargs)
