"""No failpoint without a test, and none in a build that is not for tests."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from shmsync import _native
from support.faults.failpoints import native_points, points


def test_every_point_is_walked(request):
    """By a case that runs: one that is left out, or that may skip itself, shows nothing."""
    here = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    if request.config.option.keyword or {item.path for item in here} != set(Path(__file__).parent.glob("test_*.py")):
        pytest.skip("only a part of tests/failpoints was asked for")
    runs = [item for item in here if hasattr(item, "callspec") and not may_skip(item)]
    walked = {item.callspec.params.get("point") for item in runs}
    assert points() - walked == set()


def may_skip(item):
    marks = {mark.name for mark in item.iter_markers()}
    return bool(marks & {"skip", "skipif", "xfail"}) or "pytest.skip(" in inspect.getsource(item.function)


def test_this_build_has_them():
    library = Path(_native.__file__).read_bytes()
    assert [name for name in native_points() if name.encode() not in library] == []


@pytest.mark.parametrize("spec", ["commit.current", "commit.current=whatever", "commit.current=kill@0"])
def test_a_spec_that_means_nothing_is_refused(spec):
    with pytest.raises(ValueError, match="failpoint"):
        _native.arm_failpoints(spec)
