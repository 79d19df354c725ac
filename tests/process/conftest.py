"""Real processes, started cheaply: a fork server that has torch and shmsync imported already."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Children import the functions they run from `workers`, and multiprocessing hands them this path.
sys.path.insert(0, str(HERE))

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the fork server's children must not share a thread pool

import workers  # noqa: E402
from workers import Worker  # noqa: E402


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))  # the first one waits for the fork server's imports too


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    workers.torch.set_num_threads(1)


@pytest.fixture(scope="session")
def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tensordict", "shmsync"])
    return context


@pytest.fixture
def start(server):
    """start() -> a Worker; start(3) -> three. They are gone after the test, whatever happened."""
    with workers.pool(server) as make:
        yield make


@pytest.fixture(scope="module")
def keep(server):
    """Like `start`, for workers that all tests of a module share."""
    with workers.pool(server) as make:
        yield make


@pytest.fixture
def name(request):
    """A free arena name, for publishers that are killed; their segment is removed afterwards."""
    name = f"test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"
    yield name
    workers.segment_path(name).unlink(missing_ok=True)


__all__ = ["Worker"]
