"""Workers of every start method, and the schemes that the suite runs over."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Children import the functions they run from `peers`, and multiprocessing hands them this path.
sys.path[:0] = [str(HERE), str(HERE.parent / "process")]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the fork server's children must not share a thread pool

from fleet import Crew  # noqa: E402
from table import NONE, SCHEMES  # noqa: E402


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))  # spawned workers import torch afresh


@pytest.fixture(scope="session", params=["forkserver", "fork", "spawn"])
def crew(request):
    """Idle workers of one start method; see start_methods() in table.py."""
    context = multiprocessing.get_context(request.param)
    if request.param == "forkserver":
        context.set_forkserver_preload(["torch", "tensordict", "shmsync"])
    crew = Crew(context)
    yield crew
    crew.close()


@pytest.fixture(params=SCHEMES, ids=lambda entry: entry.name)
def entry(request):
    """Each scheme that sends."""
    return request.param


@pytest.fixture(params=[*SCHEMES, NONE], ids=lambda entry: entry.name)
def scheme(request):
    """Each scheme there is, new."""
    scheme = request.param.make()
    yield scheme
    scheme.shutdown()


@pytest.fixture
def fleet(entry, crew):
    """Three workers for the scheme; see PipeFleet."""
    fleet = entry.fleet(entry, crew)
    yield fleet
    fleet.close()
