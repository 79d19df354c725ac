"""What all tests share: where helpers are found, worker processes, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
# `support` is imported by tests, by the processes they start, and by the workers of Ray: this is the one place for it.
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers on few cores must not each have a thread pool

import torch  # noqa: E402
from support import worker  # noqa: E402
from support.processes import segment_path, segments  # noqa: E402

import shmsync.schemes  # noqa: E402, F401  with what it imports

torch.set_num_threads(1)
gc.freeze()  # the million objects of what is imported are not this suite's: collecting after each test stays cheap
RUNNERS_OWN = set(sys._current_frames())  # threads of what runs the tests: pytest-xdist has some


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test must leave no arena of this process in /dev/shm, and no thread."""

    def threads() -> int:
        return sum(thread.ident not in RUNNERS_OWN for thread in threading.enumerate())

    arenas, before = set(segments()), threads()
    yield
    gc.collect()
    assert set(segments()) <= arenas
    assert threads() <= before


@pytest.fixture(scope="session")
def server():
    """Starts processes cheaply: they have torch and shmsync imported already."""
    return worker.fork_server()


@pytest.fixture
def start(server):
    """start() -> a Worker; start(3) -> three. They are gone after the test, whatever happened."""
    with worker.pool(server) as make:
        yield make


@pytest.fixture(scope="module")
def keep(server):
    """Like `start`, for workers that all tests of a module share."""
    with worker.pool(server) as make:
        yield make


@pytest.fixture
def name(request):
    """A free arena name, for publishers that are killed; their segment is removed afterwards."""
    name = f"test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"
    yield name
    segment_path(name).unlink(missing_ok=True)
