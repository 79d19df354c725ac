"""The README's first example, run as a user would. Its trainer and its workers import no tensordict.

tensordict brings torch._dynamo and sympy, and with them takes as long to import as torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import shmsync


def test_the_quickstart_runs():
    script = Path(shmsync.__file__).parent / "examples" / "quickstart.py"
    command = [sys.executable, "-X", "importtime", str(script)]  # which the processes that it starts have too
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "shmsync.workers.worker_process" in done.stderr and "tensordict" not in done.stderr
    # Two processes write to one pipe: their lines may run together.
    assert sorted(re.findall(r"worker (\d): -?\d+\.\d\d at version 101", done.stdout)) == ["0", "1"]
