"""The table of all benchmarks, run as `make bench` does, with seconds for each section: no figure is judged here."""

from __future__ import annotations

import json
import re
import shutil

import psutil
import pytest

from support.processes import until
from support.programs.benchmarks import BENCH, MACHINE, check_paste, run, say, statuses

SECTIONS = re.findall(r'^    "(\w+)": Section', (BENCH / "sections" / "__init__.py").read_text(), re.MULTILINE)
SOON = ("calls", "lock")  # the others take longer
REASONS = ("left out", "not installed")


def earlier(tmp_path, *rows, name="earlier"):
    """The file of a run that gave these rows."""
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"machine": MACHINE, "rows": rows}))
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
FAILURES = {  # modules of sections, and how the last row of each says why it has failed
    "broken": (BROKEN, "RuntimeError: what went wrong"),
    "empty": ("def rows(clock): return iter(())", "it gave no row"),
    "dying": ("import os\ndef rows(clock): os.kill(os.getpid(), 11)", "exit status -11, without a word"),
}
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
from common import machine  # PATIENCE, in seconds, and MODULES are put before this
from sections import Section
from table import run
machine.adopt_orphans()
for module in MODULES:
    for row in run("odd", Section(module, module, 1), 1, patience=PATIENCE):
        print(row.what, row.trouble, row.is_bad, sep="; ")
"""


def test_a_section_that_fails_is_a_row_that_says_why_and_keeps_what_it_had(tmp_path):
    for name, (program, _) in FAILURES.items():
        (tmp_path / f"{name}.py").write_text(program)
    program = f"PATIENCE, MODULES = 200, {list(FAILURES)}\n{RUN}"
    said = say(tmp_path, program, PYTHONPATH=str(tmp_path)).splitlines()
    assert said == ["first; ; False", *(f"{name}; failed: {why}; True" for name, (_, why) in FAILURES.items())]


@pytest.mark.full  # a third of a minute
def test_a_section_without_end_is_ended_with_all_that_it_started(tmp_path):
    child = tmp_path / "child"
    (tmp_path / "stuck.py").write_text(STUCK.format(path=str(child)))
    said = say(tmp_path, f"PATIENCE, MODULES = 20, ['stuck']\n{RUN}", PYTHONPATH=str(tmp_path)).splitlines()
    assert said == ["first; ; False", "stuck; failed: no end after 20 s; True"]
    until(lambda: not psutil.pid_exists(int(child.read_text())))


def test_the_exit_status_says_whether_all_rows_are_good(tmp_path):
    troubles = {"failed": {"trouble": "failed: x"}, "wrong": {"check": "WRONG: 1"}, "unchecked": {"check": ""}}
    files = {name: earlier(tmp_path, row(**trouble), name=name) for name, trouble in troubles.items()}
    done = run(BENCH / "table.py", "--from", files["failed"], cwd=tmp_path)
    assert done.returncode == 1 and "publish" in done.stdout
    assert statuses(tmp_path, "table.py", [*files.values(), earlier(tmp_path, row())]) == [1, 1, 1, 0]


AIMS = {
    "0.5 x": True, "0.4 x": False, ">= 0.5 x": True, ">= 1 x": False, "2 us": True, "1.5 us": False, "+ 0 us": True,
    "p99 0.004 ms": True, "p99 0.002 ms": False, "1 x, 1 us": False, "what changed": None,
}  # fmt: skip


def test_a_missed_aim_is_bold(tmp_path):
    rows = [row(what=f"aim: {aim}", aim=aim) for aim in AIMS]
    done = run(BENCH / "table.py", "--from", earlier(tmp_path, *rows), cwd=tmp_path)
    found = {aim: next(line for line in done.stdout.splitlines() if f"aim: {aim} |" in line) for aim in AIMS}
    assert {aim: "**0.50 / 0.75**" in line for aim, line in found.items()} == {
        aim: met is False for aim, met in AIMS.items()
    }


@pytest.fixture
def pages(tmp_path):
    """The folder of a copy of the two pages with tables."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/performance.md"):
        shutil.copy(BENCH.parent / name, tmp_path / name)
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
    headlines = [
        "| 100 MB to any number of readers, `publish()` with one thread | 2 µs | memcpy: 4 µs | 0.50 |",
        '| 100 MB to 4 Ray actors of a node, `fan_out="node"` | not measured in this run |',
    ]
    table = ["| another | not installed: ray |"]
    for name, mark, lines in (("README.md", "headlines", headlines), ("docs/performance.md", "table", table)):
        check_paste((pages / name).read_text(), before[name], mark, lines)


def test_a_page_without_marks_is_refused_by_name(pages):
    (pages / "README.md").write_text("nothing")
    done = run(BENCH / "table.py", "--docs", "--root", pages, "--from", earlier(pages, row()), cwd=pages)
    assert done.returncode == 1
    assert f"{pages / 'README.md'} lacks the line '<!-- headlines: begin -->'" in done.stderr
