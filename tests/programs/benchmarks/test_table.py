"""The table of all benchmarks, run as `make bench` does, with seconds for each section: no figure is judged here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.processes import until

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench"
SECTIONS = re.findall(r'^    "(\w+)": Section', (BENCH / "sections" / "__init__.py").read_text(), re.MULTILINE)
SOON = ("calls", "lock")  # the others take longer
REASONS = ("left out", "not installed")


def run(*arguments, cwd, **environment):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


def say(tmp_path, program, **environment):
    """What a program prints that uses the runner's functions, in a separate process."""
    begin = f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
    done = run("-c", begin + program, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def earlier(tmp_path, *rows):
    """The file of a run that gave these rows."""
    machine = {
        "processors": 2, "kernel": "6.18", "arch": "x86_64", "python": "3.11", "torch": "2.13", "load": 0.5,
        "others_busy": (0.0, 0.1), "seconds": 500.0,
    }  # fmt: skip
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}))
    return path


def row(**values):
    return {"what": "publish", "section": "copy", "check": "ok", "ours": [2.0, 3.0], "theirs": [4.0, 4.0], **values}


@pytest.mark.parametrize(
    "section", [pytest.param(each, marks=() if each in SOON else pytest.mark.slow) for each in SECTIONS]
)
def test_each_section_gives_rows_with_a_check_or_a_reason(tmp_path, section):
    done = run(BENCH / "table.py", "--sections", section, "--seconds", "8", "--patience", "280", "--out", tmp_path,
               cwd="/")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert {each["section"] for each in rows} == {section}
    for each in rows:
        if each["trouble"]:
            assert each["trouble"].startswith(REASONS), each
        else:
            assert each["check"] and not each["check"].startswith("WRONG"), each
    measured = [each for each in rows if each["ours"] or each["theirs"]]
    assert measured or rows[0]["trouble"].startswith("not installed")
    written = (tmp_path / "table.md").read_text()
    assert [each["what"] for each in rows if f"| {each['what']} |" not in written] == []


def test_a_lacking_package_is_a_row_that_names_it(tmp_path):
    program = """
from sections import Section
from table import run
for row in run("odd", Section("an odd one", "sections.machine", 1, ("no_such_package",)), 1, 10):
    print(row.section, row.what, row.trouble, row.is_bad, sep="; ")
"""
    assert say(tmp_path, program) == "odd; an odd one; not installed: no_such_package; False\n"


BROKEN = """
from common.row import Row
def rows(clock):
    yield Row("first", (1.0, 2.0), check="ok")
    raise RuntimeError("what went wrong")
"""
STUCK = """
import subprocess, sys, threading
from pathlib import Path
from common.row import Row
def rows(clock):
    yield Row("first", (1.0, 2.0), check="ok")
    program = "import threading; threading.Event().wait()"
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    Path({path!r}).write_text(str(child.pid))
    threading.Event().wait()
"""
RUN = """
from common import machine  # PATIENCE is put before this, in seconds
from sections import Section
from table import run
machine.adopt_orphans()
for row in run("odd", Section("an odd one", "odd", 1), 1, patience=PATIENCE):
    print(row.what, row.trouble, row.is_bad, sep="; ")
"""


def test_a_section_that_fails_is_a_row_that_says_why_and_keeps_what_it_had(tmp_path):
    (tmp_path / "odd.py").write_text(BROKEN)
    said = say(tmp_path, "PATIENCE = 200\n" + RUN, PYTHONPATH=str(tmp_path)).splitlines()
    assert said == ["first; ; False", "an odd one; failed: RuntimeError: what went wrong; True"]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("def rows(clock): return iter(())", "it gave no row"),
        ("import os\ndef rows(clock): os.kill(os.getpid(), 11)", "exit status -11, without a word"),
    ],
)
def test_a_section_that_says_nothing_is_a_failure(tmp_path, program, why):
    (tmp_path / "odd.py").write_text(program)
    assert say(tmp_path, "PATIENCE = 200\n" + RUN, PYTHONPATH=str(tmp_path)) == f"an odd one; failed: {why}; True\n"


@pytest.mark.full  # a third of a minute
def test_a_section_without_end_is_ended_with_all_that_it_started(tmp_path):
    child = tmp_path / "child"
    (tmp_path / "odd.py").write_text(STUCK.format(path=str(child)))
    said = say(tmp_path, "PATIENCE = 20\n" + RUN, PYTHONPATH=str(tmp_path)).splitlines()
    assert said == ["first; ; False", "an odd one; failed: no end after 20 s; True"]
    until(lambda: not psutil.pid_exists(int(child.read_text())))


@pytest.mark.parametrize(
    ("trouble", "status"), [({"trouble": "failed: x"}, 1), ({"check": "WRONG: 1"}, 1), ({"check": ""}, 1), ({}, 0)]
)
def test_the_exit_status_says_whether_all_rows_are_good(tmp_path, trouble, status):
    done = run(BENCH / "table.py", "--from", earlier(tmp_path, row(**trouble)), cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert "publish" in done.stdout


@pytest.mark.parametrize(
    ("aim", "met"),
    [("0.5 x", True), ("0.4 x", False), (">= 0.5 x", True), (">= 1 x", False), ("2 us", True), ("1.5 us", False),
     ("+ 0 us", True), ("p99 0.004 ms", True), ("p99 0.002 ms", False), ("1 x, 1 us", False), ("what changed", None)],
)  # fmt: skip
def test_a_missed_aim_is_bold(tmp_path, aim, met):
    done = run(BENCH / "table.py", "--from", earlier(tmp_path, row(aim=aim)), cwd=tmp_path)
    assert ("**0.50 / 0.75**" in done.stdout) == (met is False)


@pytest.fixture
def pages(tmp_path):
    """The folder of a copy of the two pages with tables."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/performance.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


CELL = """
import json, os, sys
from pathlib import Path
engine, nodes, workers, seconds, result, *sizes = sys.argv[1:]
bare = f"{engine}, variable: {os.environ.get('RAY_ENABLE_ZERO_COPY_TORCH_TENSORS')}"
contestants = {name: {"p50_ms": 1.0, "p99_ms": 2.0} for name in ("shmsync", "shmsync, by node", bare)}
Path(result).write_text(json.dumps([{"size": size, "contestants": contestants} for size in sizes]))
"""
RAY = """
from common.clock import Clock
from remote import section
section.PROGRAM = "cell.py"
for row in section.ray(Clock(1000)):
    print(row.what, row.floor, sep="; ")
"""


@pytest.mark.full  # a cluster of Ray's
def test_ray_with_and_without_zero_copy_tensors_are_cells_of_their_own(tmp_path):
    (tmp_path / "cell.py").write_text(CELL)
    program = RAY.replace('"cell.py"', repr(str(tmp_path / "cell.py")))
    said = say(tmp_path, program, RAY_ENABLE_ZERO_COPY_TORCH_TENSORS="1").splitlines()
    for where in ("1 node, 4 workers", "2 nodes, 4 workers", "1 node, 1 worker", "2 nodes, 1 worker"):
        for way in ("to each worker", "by node"):
            assert f"Ray, 100 MB, {where}, {way}; ray, variable: None" in said
            assert f"Ray, zero-copy tensors, 100 MB, {where}, {way}; ray, variable: 1" in said


def test_the_tables_are_pasted_between_their_marks_and_nothing_else_changes(pages):
    measured = row(what="publish 100 MB in 14 tensors, 1 thread", floor="memcpy")
    found = earlier(pages, measured, row(what="another", trouble="not installed: ray"))
    before = {name: (pages / name).read_text() for name in ("README.md", "docs/performance.md")}
    for _ in range(2):  # the second time replaces what the first has written
        done = run(BENCH / "table.py", "--docs", "--root", pages, "--from", found, cwd=pages)
        assert done.returncode == 0, done.stderr
    for name, mark, line in (
        (
            "README.md",
            "headlines",
            "| 100 MB to any number of readers, `publish()` with one thread | 2 µs | memcpy: 4 µs | 0.50 |",
        ),
        ("README.md", "headlines", '| 100 MB to 4 Ray actors of a node, `fan_out="node"` | not measured in this run |'),
        ("docs/performance.md", "table", "| another | not installed: ray |"),
    ):
        now = (pages / name).read_text()
        begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->\n"
        assert now.count(line) == 1
        assert now.partition(begin)[0] == before[name].partition(begin)[0]
        assert now.partition(end)[2] == before[name].partition(end)[2]


def test_a_page_without_marks_is_refused_by_name(pages):
    (pages / "README.md").write_text("nothing")
    done = run(BENCH / "table.py", "--docs", "--root", pages, "--from", earlier(pages, row()), cwd=pages)
    assert done.returncode == 1
    assert f"{pages / 'README.md'} lacks the line '<!-- headlines: begin -->'" in done.stderr
