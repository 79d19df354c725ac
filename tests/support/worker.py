"""A process that a test drives: `worker.call(function, *args)` runs `function(state, *args)` there.

The `state` lasts as long as the worker. So a test reads in the order in which things happen, across processes.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import traceback
from types import SimpleNamespace

import torch

from support import processes
from support.devices import first_gpu, simulated

SETTLE = {"simulated": simulated.settle, "cuda": first_gpu.settle}


class Gone(Exception):
    """The worker died instead of answering."""

    def __init__(self, exitcode):
        super().__init__(f"the worker died with exit code {exitcode}")
        self.exitcode = exitcode


class RemoteTraceback(Exception):
    def __str__(self):
        return "\n" + self.args[0]


class Worker:
    def __init__(self, context, between=None, target=None):
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=target or serve, args=(theirs, between), daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid
        self.busy = False

    def start(self, function, *args, **kwargs):
        """Run it there; do not wait."""
        self.busy = True
        self.conn.send((function, args, kwargs))

    def begin(self, function, *args, **kwargs):
        """Run it there; wait until it has begun."""
        self.start(begun, function, *args, **kwargs)
        assert self.conn.recv() == BEGUN

    def result(self):
        """What the call started last returned. Raises what it raised."""
        assert self.conn.poll(processes.PATIENCE), f"worker {self.pid} does not answer"
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
        """SIGSTOP, and wait until it has stopped. An idle worker's device first does what it has."""
        settle = SETTLE.get(os.environ.get("SHMSYNC_TEST_DEVICE", ""))
        if settle is not None and not self.busy:
            self.call(settle)
        processes.stop(self.pid)

    def resume(self):
        processes.resume(self.pid)

    def finish(self):
        """Let it run to its normal end; its exit code."""
        self.conn.send(None)
        self.process.join()
        return self.process.exitcode

    def end(self):
        """At the end of a test, whatever state it is in."""
        if self.process.is_alive() and not self.busy:
            with contextlib.suppress(BrokenPipeError, ProcessLookupError):  # it dies just now
                self.resume()
                self.conn.send(None)
            self.process.join(60)
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                self.kill()
        self.process.join()
        self.conn.close()


# What the names of shmsync and shmsync.schemes stand for; `import shmsync` alone imports none of it. Pytest, which each
# process imports that runs a function of a test's file. And the functions that most of them run.
PRELOADED = [
    "pytest",
    "torch",
    "tensordict",
    "shmsync.engine.publisher",
    "shmsync.engine.subscriber",
    "shmsync.schemes.none",
    "shmsync.schemes.multiprocess",
    "shmsync.schemes.shared_memory",
    "support.worker",
    "support.jobs.engine",
    "support.conformance.peers",
]


def fork_server():
    """The context of multiprocessing whose processes have torch and shmsync imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


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


def nothing(state):
    """Ends a call that runs until the next one."""


BEGUN = "begun"


def begun(state, function, *args, **kwargs):
    state.conn.send(BEGUN)
    return function(state, *args, **kwargs)


def serve(conn, between=None):
    """Answer calls; before each, and while there is none, `between(state)` may do other work."""
    torch.set_num_threads(1)
    gc.freeze()  # else each collection here walks, and so copies, what the fork server has imported
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
        conn.send(answer(state, *call))


def answer(state, function, args, kwargs):
    """A call of the test: has it returned, its value or what it raised, and the traceback of that."""
    try:
        return True, function(state, *args, **kwargs), None
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return False, error, trace
