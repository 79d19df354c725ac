"""A Python program that a benchmark runs beside itself, and ends after a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any


def kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(words: tuple[Any, ...], patience: float, end: Callable[[subprocess.Popen[bytes]], None] = kill_group) -> str:
    """Run Python with these words. Return why it failed, or ""; then what it wrote is on stderr."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", errors="replace") as output:
        # From an empty folder: Ray puts the working directory on the path of its actors.
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], stdout=output, stderr=output, cwd=folder, start_new_session=True
        )
        try:
            if (status := process.wait(patience)) == 0:
                return ""
            trouble = f"exit status {status}, without a word"
        except subprocess.TimeoutExpired:
            status, trouble = 0, f"no end after {patience:.0f} s"
        finally:
            end(process)
        output.seek(0)
        said = output.read()
    print(said[-4000:], file=sys.stderr, flush=True)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:200] if status and lines else trouble
