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
from fleet_processes import DistributedWorld, RPCWorld, SocketWorld, WorldCrew  # noqa: E402
from fleet_ray import RayCrew  # noqa: E402
from table import NONE, SCHEMES  # noqa: E402

REMOTE = {"ray": RayCrew, "rpc": lambda: WorldCrew(RPCWorld), "distributed": lambda: WorldCrew(DistributedWorld)}
REMOTE["socket"] = lambda: WorldCrew(SocketWorld)


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if HERE not in item.path.parents or fits(item)]
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))  # spawned workers import torch afresh


def fits(item):
    """Does this scheme run over this kind of workers?"""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return not given.keys() >= {"entry", "crew"} or given["crew"] in given["entry"].crews


@pytest.fixture(scope="session", params=["forkserver", "fork", "spawn", *REMOTE])
def crew(request):
    """Idle workers of one kind: processes by start method (see start_methods() in table.py), or a remote kind."""
    if request.param in REMOTE:
        crew = REMOTE[request.param]()
        yield crew
        crew.close()
        return
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
def any_entry(request):
    """Each scheme there is."""
    return request.param


@pytest.fixture
def scheme(any_entry):
    """A new one."""
    scheme = any_entry.make()
    yield scheme
    scheme.shutdown()


@pytest.fixture
def ends(any_entry):
    """What it gets to know one worker by; see Ends."""
    with any_entry.ends() as ends:
        yield ends


@pytest.fixture
def fleet(entry, crew):
    """Three workers for the scheme; see Fleet."""
    fleet = entry.fleet(entry, crew)
    yield fleet
    fleet.close()
