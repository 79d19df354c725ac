"""The program that runs the litmus tests: what it makes of a marker, and what it says where herd7 is missing."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LITMUS = Path(__file__).parents[3] / "native" / "tests" / "litmus"
ONE = """C one
{ x = 0; }
P0 (atomic_int* x) {
  STATEMENT
}
exists (0:r = 1)
"""


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("litmus_run", LITMUS / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def written(folder, statement):
    path = folder / "one.c11.litmus"
    path.write_text(ONE.replace("STATEMENT", statement))
    return path


def test_each_mutation_of_a_marker_is_a_text_of_its_own(run, tmp_path):
    path = written(tmp_path, "atomic_thread_fence(memory_order_seq_cst); // SYNC a.b => drop => acq_rel")
    base, dropped, weaker = (case.text for case in run.cases(path))
    assert "SYNC" not in base + dropped + weaker
    assert "fence(memory_order_seq_cst)" in base
    assert "fence" not in dropped
    assert "fence(memory_order_acq_rel)" in weaker


def test_a_compare_and_swap_is_weakened_where_it_succeeds(run, tmp_path):
    cas = "int r = atomic_compare_exchange_strong_explicit(x, e, 2, memory_order_acq_rel, memory_order_relaxed);"
    _, weaker = (case.text for case in run.cases(written(tmp_path, f"{cas}  // SYNC a.b => release")))
    assert "2, memory_order_release, memory_order_relaxed" in weaker


def test_a_statement_may_take_the_place_of_another(run, tmp_path):
    _, other = (case.text for case in run.cases(written(tmp_path, "int r = 0;  // SYNC a.b => int r = 1;")))
    assert "int r = 1;" in other
    assert "int r = 0" not in other


def test_a_marker_that_cannot_be_read_is_refused_and_not_passed_over(run, tmp_path):
    path = written(tmp_path, "int r = 1;  // SYNC A.b => int r = 2;")
    with pytest.raises(ValueError, match=r"one\.c11\.litmus: cannot read the marker"):
        run.cases(path)


def test_an_order_that_is_no_weaker_is_refused(run, tmp_path):
    path = written(tmp_path, "atomic_thread_fence(memory_order_release); // SYNC a.b => release")
    with pytest.raises(ValueError, match="cannot weaken"):
        run.cases(path)


def test_without_herd7_it_names_what_was_never_run(tmp_path):
    folder = tmp_path / "litmus"
    shutil.copytree(LITMUS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    program = [sys.executable, str(folder / "run.py")]

    def said():
        done = subprocess.run(program, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    first, *never_run = said()
    assert first.startswith("herd7 is not installed: the litmus tests are not run.")
    before = len(never_run)
    changed = folder / "publication.c11.litmus"
    changed.write_text(changed.read_text().replace("current = 1", "current = 5", 1))
    never_run = said()[1:]
    assert len(never_run) > before
    assert any(line.split() == ["NEVER", "RUN", "publication.c11", "as", "designed"] for line in never_run)
