"""Workers of every start method, and the schemes that the suite runs over."""

import contextlib
import multiprocessing

import pytest

from support.conformance.fleet import Crew
from support.conformance.fleet_processes import DistributedWorld, RPCWorld, WorldCrew
from support.conformance.fleet_ray import RayCrew
from support.conformance.rigs import KINDS, rigs
from support.conformance.table import NONE, SCHEMES
from support.worker import fork_server

REMOTE = {"ray": RayCrew, "rpc": lambda: WorldCrew(RPCWorld), "distributed": lambda: WorldCrew(DistributedWorld)}


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if fits(item)]


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
    crew = Crew(fork_server() if request.param == "forkserver" else multiprocessing.get_context(request.param))
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
    return any_entry.ends()


@pytest.fixture
def fleet(entry, crew):
    """Three workers for the scheme; see Fleet."""
    fleet = entry.fleet(entry, crew)
    yield fleet
    fleet.close()


@pytest.fixture(params=KINDS)
def kind(request):
    """Each kind of sender and receiver; see rigs.py."""
    return request.param


@pytest.fixture
def make(kind):
    """Makes a rig of this kind."""
    with rigs(kind) as make:
        yield make


@pytest.fixture
def rig_of():
    """rig_of(PipeRig, scheme class, options) -> a rig, which is closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda rig, *args, **options: stack.enter_context(contextlib.closing(rig(*args, **options)))


@pytest.fixture
def pipe():
    """(the trainer's end, the worker's)."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        yield ours, theirs
