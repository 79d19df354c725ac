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


FENCE = "atomic_thread_fence(memory_order_seq_cst);"
CAS = "int r = atomic_compare_exchange_strong_explicit(x, e, 2, memory_order_acq_rel, memory_order_relaxed);"
MUTATIONS = {  # the statement, what a marker makes of it, and what each text has in its place
    "a fence": (FENCE, "drop => acq_rel", [FENCE, "", "atomic_thread_fence(memory_order_acq_rel);"]),
    "where a compare-and-swap succeeds": (CAS, "release", [CAS, CAS.replace("acq_rel", "release")]),
    "another statement": ("int r = 0;", "int r = 1;", ["int r = 0;", "int r = 1;"]),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_each_mutation_of_a_marker_is_a_text_of_its_own(run, tmp_path, what):
    statement, weaker, expected = MUTATIONS[what]
    cases = run.cases(written(tmp_path, f"{statement}  // SYNC a.b => {weaker}"))
    texts = [case.text for case in cases]
    assert [text.split("{\n")[1].partition("}")[0].strip() for text in texts] == expected


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("int r = 1;  // SYNC A.b => int r = 2;", r"one\.c11\.litmus: cannot read the marker"),
        ("atomic_thread_fence(memory_order_release); // SYNC a.b => release", "cannot weaken"),
    ],
    ids=["a marker that cannot be read", "an order that is no weaker"],
)
def test_a_marker_that_would_change_nothing_is_refused(run, tmp_path, statement, said):
    with pytest.raises(ValueError, match=said):
        run.cases(written(tmp_path, statement))


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
