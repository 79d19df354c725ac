"""What all tests share: where helpers are found, worker processes, and that nothing is left behind."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
# `support` is imported by tests, by the processes they start, and by the workers of Ray: this is the one place for it.
sys.path.insert(0, HERE)
sys.path.append(
    str(Path(HERE).parent)
)  # workers find functions of test files; last, or shmsync/ would shadow the package
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers on few cores must not each have a thread pool

# With SHMSYNC_TEST_DEVICE=simulated all arenas and new tensors lie on a device without hardware, with =cuda on a GPU,
# with SHMSYNC_TEST_TENSORS=host too only the arenas; see support/devices/simulated.py and first_gpu.py.
DEVICE = os.environ.get("SHMSYNC_TEST_DEVICE")
if DEVICE not in (None, "simulated", "cuda"):
    raise pytest.UsageError(f"SHMSYNC_TEST_DEVICE is 'simulated' or 'cuda', not {DEVICE!r}")
if DEVICE:
    os.environ["PYTHONPATH"] = os.pathsep.join([HERE + "/simulated", os.environ["PYTHONPATH"]])
    exec(Path(HERE, "simulated", "sitecustomize.py").read_text())  # as Python has done in the processes they start

import torch  # noqa: E402

from support import worker  # noqa: E402
from support.processes import PATIENCE, segment_path, segments  # noqa: E402

torch.set_num_threads(1)
for _module in worker.PRELOADED:
    importlib.import_module(_module)
STDERR = -1
RUNNERS_OWN = set(sys._current_frames())  # threads of what runs the tests: pytest-xdist has some


def pytest_configure(config):
    global STDERR
    STDERR = os.dup(2)  # before a test's output is captured


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node):
    """Both limits are cancelled when a test fails: set one again, for what its fixtures close then."""
    limit = float(node.config.getini("faulthandler_timeout"))
    if limit and isinstance(node, pytest.Item):
        leave = node.config.getini("faulthandler_exit_on_timeout")
        faulthandler.dump_traceback_later(limit, file=STDERR, exit=leave)  # pytest cancels it after the test


def pytest_runtest_setup(item):
    mark = item.get_closest_marker("host_memory")
    if DEVICE and mark is not None:
        pytest.skip(f"only where weights lie in the host's memory: {mark.kwargs['reason']}")
    mark = item.get_closest_marker("no_cuda")
    if DEVICE == "cuda" and mark is not None:
        pytest.skip(f"not where weights lie on a GPU: {mark.kwargs['reason']}")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the marks
def pytest_collection_modifyitems(items):
    """Tests that share a Ray or a file run one after the other, with -n in one process."""
    for item in items:
        if item.path.relative_to(HERE).parts[0] not in ("programs", "zoo"):  # these share nothing
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=lambda item: rank(group_of(item)))  # those that take long begin


def rank(group):
    return not group.startswith(("ray", "torchrl")), group


def group_of(item):
    """One Ray, and two fork servers that have TorchRL imported: each takes a core for a while to start."""
    where = item.path.relative_to(HERE)
    if where.parts[:2] == ("integrations", "collectors"):
        return f"torchrl {zlib.crc32(where.name.encode()) % 2}"
    return "ray" if where.parent.name == "ray" else str(where)


def collect_garbage():
    """gc.collect(), which looks at no object of what was imported: with those it takes up to half a second a test.

    What a test imports is a million objects too, where it compiles a module. So what is alive when a collection took
    long is set aside: it is not garbage now. Where a test leaves something, all of it is looked at again.
    """
    begun = time.thread_time()
    gc.collect()
    if time.thread_time() - begun > 0.02:
        gc.freeze()


pytest_collection_finish = collect_garbage


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Most tests wait for other processes: two for each core. A single file or test runs in this process."""
    if len(config.args) == 1 and Path(config.args[0].partition("::")[0]).is_file():
        return 0
    return min(8, 2 * len(os.sched_getaffinity(0)))


def modes_of_torch() -> tuple[Any, ...]:
    """What a call that ended half-way could have left switched on, or off, in this thread."""
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    on = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_torch_function_enabled()
    return (*on, torch.is_autocast_cache_enabled(), *map(str, keys))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test must leave no arena of this process in /dev/shm, no thread, and torch's modes as they were."""

    def threads() -> list[str]:
        # A simulated stream ends with its arena, later. Ray's threads live as long as Ray; a dummy is one of these.
        others = ("simulated stream", "PythonGCThread", "ray_")
        found = (each for each in threading.enumerate() if not each.name.startswith(others))
        mine = (each for each in found if not isinstance(each, threading._DummyThread))
        return [f"{each.name} ({type(each).__name__})" for each in mine if each.ident not in RUNNERS_OWN]

    arenas, before, modes = set(segments()), threads(), modes_of_torch()
    yield
    assert modes_of_torch() == modes
    collect_garbage()
    if not set(segments()) <= arenas or len(threads()) > len(before):
        gc.unfreeze()  # garbage now, and alive when the rest was set aside
        gc.collect()
    assert set(segments()) <= arenas
    # an executor that is closed while Ray or a store has not answered it yet ends when they have.
    end = time.monotonic() + PATIENCE
    while len(left := threads()) > len(before):
        assert time.monotonic() < end, f"threads {left}; before the test {before}"
        time.sleep(0.01)


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
