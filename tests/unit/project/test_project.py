"""The package that is tested is the installed one, without failpoints, and each ordering of its core has a partner."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmsync
from shmsync import _native
from support.faults.forged import write
from support.weights import stamped

PACKAGE = Path(shmsync.__file__).parent
NATIVE = Path(__file__).parents[3] / "native"
ABI_AT = 8
MARKER = re.compile(r"SYNC ((?:[a-z]+(?:\.[a-z]+)?)(?:, [a-z]+\.[a-z]+)*)\b")


def test_the_installed_package_is_tested_and_typed():
    assert not PACKAGE.is_relative_to(NATIVE.parent / "shmsync")
    assert (PACKAGE / "py.typed").exists()
    assert "class Reader" in (PACKAGE / "_native.pyi").read_text()


def markers(files):
    found = {}
    for file in files:
        for line in file.read_text().splitlines():
            for match in MARKER.finditer(line):
                for name in match[1].split(", "):
                    found.setdefault(name, []).append(line)
    return found


def test_every_ordering_in_the_native_code_names_its_partner():
    code = markers(path for folder in ("include", "src", "bind") for path in (NATIVE / folder).rglob("*.[ch]pp"))
    litmus = markers((NATIVE / "tests" / "litmus").glob("*.litmus"))
    for name, lines in code.items():
        named = any(f"pairs with {other}." in line for line in lines for other in code)
        assert len(lines) > 1 or named, f"{name} has no partner"
    assert set(code) == set(litmus)
    assert [name for name, lines in litmus.items() if not any("=>" in line for line in lines)] == []


def test_an_ordinary_build_has_no_failpoints():
    if hasattr(_native, "arm_failpoints"):
        pytest.skip("this build is that of `make test-failpoints`")
    names = {
        name for path in NATIVE.rglob("*.cpp") for name in re.findall(r'SHMSYNC_FAILPOINT\("(.+)"\)', path.read_text())
    }
    assert len(names) > 30
    library = Path(_native.__file__).read_bytes()
    assert [name for name in sorted(names) if name.encode() in library] == []


def test_another_system_is_refused_in_one_sentence():
    program = "import sys; sys.platform = 'darwin'; import shmsync"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: shmsync runs on Linux only")


@pytest.mark.parametrize("difference", [-1, 1])
def test_an_arena_of_another_release_is_refused_with_both_numbers_of_its_layout(difference):
    other = _native.ABI + difference
    with shmsync.Publisher(stamped(1)) as pub:
        write(pub.name, ABI_AT, other.to_bytes(4, "little"))
        try:
            for handle in (pub.handle, pub.name):
                with pytest.raises(shmsync.ArenaCorrupt, match=str(other)) as caught:
                    shmsync.Subscriber(handle, timeout=0.1)
                assert str(_native.ABI) in str(caught.value)
        finally:
            write(pub.name, ABI_AT, _native.ABI.to_bytes(4, "little"))
        assert pub.readers() == []
