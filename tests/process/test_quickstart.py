"""The README's first example, run as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import shmsync


def test_the_quickstart_runs():
    script = Path(shmsync.__file__).parent / "examples" / "quickstart.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split(":")[0] for line in done.stdout.splitlines()) == ["worker 0", "worker 1"]
    assert done.stdout.count("at version 102") == 2
