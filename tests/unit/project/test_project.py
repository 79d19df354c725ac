"""The project itself: its exports, its markers, and that the installed package is what is tested."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmsync
from shmsync import _native
from shmsync.collectors.collector import START_TIMEOUT
from shmsync.engine.copy.converting import STAGED_BYTES
from shmsync.engine.deadlines import DEFAULT_TIMEOUT
from shmsync.schemes.pipes.weights_message import LARGE

PACKAGE = Path(shmsync.__file__).parent


def test_every_export_exists_and_errors_form_one_tree():
    for name in shmsync.__all__:
        assert getattr(shmsync, name).__module__.startswith("shmsync")
    classes = [value for value in vars(shmsync.errors).values() if isinstance(value, type)]
    errors = [value for value in classes if issubclass(value, Exception)]
    assert len(errors) == 23
    for error in errors:
        assert issubclass(error, shmsync.ShmSyncError)
        assert error.__name__ in shmsync.__all__
    for name in ("WriterBusy", "ReaderStalled", "PublishTimeout", "AckTimeout"):
        assert issubclass(getattr(shmsync, name), TimeoutError)


def test_the_installed_package_is_tested_and_typed():
    assert "site-packages" in str(PACKAGE)
    assert (PACKAGE / "py.typed").exists()
    assert "class Reader" in (PACKAGE / "_native.pyi").read_text()


NATIVE = Path(__file__).parents[3] / "native"
MARKER = re.compile(r"SYNC ((?:[a-z]+(?:\.[a-z]+)?)(?:, [a-z]+\.[a-z]+)*)\b")


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
    never_weakened = [name for name, lines in litmus.items() if not any("=>" in line for line in lines)]
    assert never_weakened == []
    documented = (NATIVE.parent / "docs" / "guarantees.md").read_text()
    assert [name for name in code if f"`{name}`" not in documented] == []


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


def test_another_system_is_refused_in_one_sentence():
    program = "import sys; sys.platform = 'darwin'; import shmsync"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: shmsync runs on Linux only")


def test_schemes_for_several_machines_are_found_in_both_places():
    for name in ("RayWeightSyncScheme", "RPCTransport", "DistributedWeightSyncScheme", "WeightUpdaterBase"):
        assert getattr(shmsync, name) is getattr(shmsync.schemes, name)


ROOT = NATIVE.parent


def test_the_readme_is_a_front_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert "make demo" in text and "make test" in text
    assert re.findall(r"\d+ min", text) == []  # the run times of the tests stand in CONTRIBUTING.md


def test_the_pages_give_the_limits_of_the_code():
    def page(name):
        return (ROOT / "docs" / name).read_text()

    defaults = re.findall(r"(?:one machine|RayWeightUpdater`|start of the workers) \| (\d+) \|", page("guarantees.md"))
    remote = inspect.signature(shmsync.DistributedWeightSyncScheme).parameters["timeout"].default
    assert [float(each) for each in defaults] == [DEFAULT_TIMEOUT, remote, START_TIMEOUT]
    wake = re.search(r"kWakeAbove = std::size_t\{(\d+)\} << 20", (NATIVE / "include/shmsync/copy.hpp").read_text())
    assert f"They help with copies of {wake[1]} MiB and more" in page("troubleshooting.md")
    assert f"are at most\n{STAGED_BYTES >> 20} MiB together" in page("weights.md")
    assert f"Weights of less than {LARGE >> 20} MiB are in the message" in page("schemes.md")


def test_only_one_page_says_how_to_install_an_extra():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]
    found = [path.name for path in pages if "pip install 'shmsync[" in path.read_text()]
    assert found == ["compatibility.md"]
    listed = re.findall(r"^\| ((?:`[a-z]+`(?:, )?)+) \|", (ROOT / "docs/compatibility.md").read_text(), re.MULTILINE)
    extras = set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    named = set(re.findall(r"`([a-z]+)`", " ".join(listed)))
    assert named <= extras and {"collectors", "torchrl", "ray", "verify", "top"} <= named
