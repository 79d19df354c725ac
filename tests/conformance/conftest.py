"""Workers, and the schemes that the suite runs over."""

import contextlib
import multiprocessing

import pytest

from support.conformance.fleet import Crew, Fleet
from support.conformance.rigs import KINDS, rigs
from support.conformance.table import DISTRIBUTED, NONE, PIPES, RAY, RAY_MODULE, RPC
from support.worker import fork_server


@pytest.fixture(scope="session")
def crew():
    """Idle workers, which one test after the other uses."""
    made = Crew(fork_server())
    yield made
    made.close()


@pytest.fixture(params=PIPES, ids=lambda entry: entry.name)
def entry(request):
    """The schemes of one machine."""
    return request.param


@pytest.fixture(params=[*PIPES, RAY, RAY_MODULE, RPC, DISTRIBUTED, NONE], ids=lambda entry: entry.name)
def any_entry(request):
    """Each scheme there is, for tests that send nothing."""
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
    fleet = Fleet(entry, crew)
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
