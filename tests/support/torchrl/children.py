"""A separate process for code that may hang."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from pathlib import Path

import psutil
import torch

from support.processes import remove_segments
from support.torchrl.parts import server, starting


class Child:
    """A separate process that runs function(say, *args), and may hang; say(...) is heard here."""

    def __init__(self, context, function, args):
        self._ours, theirs = context.Pipe(duplex=False)
        place = inspect.getfile(function), function.__name__
        self.process = context.Process(target=run_in_child, args=(place, theirs, args))
        self.process.start()
        theirs.close()

    def hear(self):
        """What it says next, or how it ended when it has ended."""
        try:
            return self._ours.recv()
        except EOFError:
            self.process.join()
            return f"exit code {self.process.exitcode}"

    def end(self):
        self.process.kill()
        self.process.join()
        self._ours.close()
        remove_segments(self.process.pid)


@contextlib.contextmanager
def child(function, *args, method="forkserver"):
    """A Child; in the end it is dead, and the workers that it started are."""
    before = server.workers()
    with starting(method) as context:
        child = Child(context, function, args)
    try:
        yield child
    finally:
        child.end()
        for process in server.workers() - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# ---- in a worker


def run_in_child(place, pipe, args):
    path, name = place
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    getattr(module, name)(pipe.send, *args)
