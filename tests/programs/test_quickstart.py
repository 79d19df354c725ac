"""The README's first example, run as a user would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import shmsync


def test_the_quickstart_runs():
    script = Path(shmsync.__file__).parent / "examples" / "quickstart.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    # Two processes write to one pipe: their lines may run together.
    assert sorted(re.findall(r"worker (\d): -?\d+\.\d\d at version 101", done.stdout)) == ["0", "1"]
