"""Each system call fails once: shmsync's call succeeds, or raises a typed error and has changed nothing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.choice import first
from support.faults import scenarios as fault_scenarios

SOURCE = Path(__file__).parents[2] / "support" / "faults" / "faults.c"
FEW, EVERY = 12, 10**6  # cases of each scenario
GROUPS = list(fault_scenarios.GROUPS)
SOON = 3 if os.environ.get("SHMSYNC_TEST_DEVICE") else 1  # CI runs no pairs on a device
CASES = [*((group, FEW) for group in GROUPS[:SOON]), *((group, EVERY) for group in GROUPS)]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("failures are injected by a small C library: install a compiler named cc")
    target = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, SOURCE, "-ldl"], check=True)
    return target


@pytest.mark.no_cuda(reason="CUDA's own calls to the system fail too, and the error is CUDA's")
@pytest.mark.parametrize(
    "case", first(CASES, SOON), ids=lambda case: f"{'few' if case[1] == FEW else 'every'}-{case[0]}"
)
def test_a_failing_system_call(library, case):
    group, cases = case
    names = ",".join(scenario.__name__ for scenario in fault_scenarios.GROUPS[group])
    command = [sys.executable, "-m", "support.faults.faults", names, str(cases), "1"]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    injected = [int(number) for number in re.findall(r"(\d+) failures injected", done.stdout)]
    assert len(injected) == len(fault_scenarios.GROUPS[group])
    assert sum(injected) > 0
