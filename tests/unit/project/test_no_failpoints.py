"""Failpoints are for tests: the library that is installed has none of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shmsync import _native

NATIVE = Path(__file__).parents[3] / "native"


def test_an_ordinary_build_has_no_failpoints():
    if hasattr(_native, "arm_failpoints"):
        pytest.skip("this build is that of `make test-failpoints`")
    names = {
        name for path in NATIVE.rglob("*.cpp") for name in re.findall(r'SHMSYNC_FAILPOINT\("(.+)"\)', path.read_text())
    }
    assert len(names) > 30
    library = Path(_native.__file__).read_bytes()
    assert [name for name in sorted(names) if name.encode() in library] == []
    assert b"SHMSYNC_FAILPOINT" not in library and b"failpoint" not in library
