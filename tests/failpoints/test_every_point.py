"""No failpoint without a test, and none in a build that is not for tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shmsync import _native
from support.faults.failpoints import native_points, points


def test_every_point_is_walked():
    """A point is in the text of a test: whole, or as the two halves of an f-string."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    quoted = set(re.findall(r'"([a-z_.]+)"', text))
    walked = {f"{row}.{point}" for row in ("claim", "take_over") for point in quoted}
    assert points() - quoted - walked == set()


def test_this_build_has_them():
    library = Path(_native.__file__).read_bytes()
    assert [name for name in native_points() if name.encode() not in library] == []


@pytest.mark.parametrize("spec", ["commit.current", "commit.current=whatever", "commit.current=kill@0"])
def test_a_spec_that_means_nothing_is_refused(spec):
    with pytest.raises(ValueError, match="failpoint"):
        _native.arm_failpoints(spec)
