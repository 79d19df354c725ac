"""A run of several processes ends, whichever of them dies: its test has failed, the others' are done."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]  # of support/
FILES, TESTS = 12, 5
CONFTEST = """
from support import schedule

def pytest_xdist_make_scheduler(config, log):
    return schedule.make_scheduler(config, log)
"""
EXITS, HANGS = "os._exit(3)", "ctypes.PyDLL(None).sleep(100)"  # the second one with the GIL


# How a process ends does not change which files are left: each case has one of the ways.
@pytest.mark.parametrize(
    ("dies", "files"),
    [
        (EXITS, (0,)),
        (EXITS, (FILES - 1,)),
        (HANGS, (2, 3)),
        (EXITS, (FILES - 2, FILES - 1)),
    ],
    ids=["the first", "the last", "two in the middle", "the last two"],
)
def test_a_run_goes_on_without_a_process_that_died(tmp_path, dies, files):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(FILES):
        body = f"    if number == {TESTS // 2}: {dies}\n" if number in files else ""
        (tmp_path / f"test_{number:02}.py").write_text(
            "import ctypes, os, time, pytest\n\n"
            f"@pytest.mark.parametrize('number', range({TESTS}))\n"
            f"def test(number):\n{body}    time.sleep(0.001)\n"
        )
    limit = ["-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *limit, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(HERE)}, capture_output=True, text=True, timeout=120
    )
    passed = FILES * TESTS - len(files)
    assert re.search(rf"{len(files)} failed, {passed} passed", done.stdout), done.stdout + done.stderr
    for file in files:
        assert f"FAILED test_{file:02}.py::test[{TESTS // 2}] - worker" in done.stdout
    assert ("Fatal Python error" in done.stderr or "Timeout (0:00:01)!" in done.stderr) == (dies == HANGS)
