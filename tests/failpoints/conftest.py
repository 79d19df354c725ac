"""These tests need a build with failpoints."""

import itertools

import pytest

from shmsync import _native
from support.faults.failpoints import CHOICES, USUAL, Held


def pytest_collection_modifyitems(items):
    if not hasattr(_native, "arm_failpoints"):
        for item in items:
            if item.path.parent.name == "failpoints":
                item.add_marker(pytest.mark.skip(reason="this build has no failpoints; run `make test-failpoints`"))


def pytest_generate_tests(metafunc):
    """Each test in the USUAL combinations of action, slots and consistency; in all the others it is slow."""
    given = {name for mark in metafunc.definition.iter_markers("parametrize") for name in parameters(mark)}
    names = [name for name in CHOICES if name in metafunc.fixturenames and name not in given]
    if names:
        usual = {tuple(each[list(CHOICES).index(name)] for name in names) for each in USUAL}
        every = itertools.product(*(CHOICES[name] for name in names))
        metafunc.parametrize(
            names, [pytest.param(*each, marks=() if each in usual else pytest.mark.slow) for each in every]
        )


def parameters(mark):
    return mark.args[0] if isinstance(mark.args[0], tuple) else [mark.args[0]]


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
