"""These tests need a build with failpoints."""

import pytest

from shmsync import _native
from support.faults.failpoints import ACTIONS, CONSISTENCIES, SLOTS, Held


def pytest_collection_modifyitems(items):
    if not hasattr(_native, "arm_failpoints"):
        for item in items:
            if item.path.parent.name == "failpoints":
                item.add_marker(pytest.mark.skip(reason="this build has no failpoints; run `make test-failpoints`"))


@pytest.fixture(params=ACTIONS)
def action(request):
    return request.param


@pytest.fixture(params=SLOTS)
def slots(request):
    return request.param


@pytest.fixture(params=CONSISTENCIES)
def consistency(request):
    return request.param


@pytest.fixture
def hold(action):
    """hold(worker, point, nth=1) -> a Held, for the action of this test."""
    made = []

    def make(worker, point, nth=1):
        made.append(Held(worker, point, action, nth).__enter__())
        return made[-1]

    yield make
    for held in reversed(made):
        held.__exit__()
