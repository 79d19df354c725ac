"""The benchmarks of bench/, run as `make bench` does, and programs that use their functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench"
MACHINE = {  # of the file of an earlier run
    "processors": 2, "kernel": "6.18", "arch": "x86_64", "python": "3.11", "torch": "2.13", "load": 0.5,
    "others_busy": (0.0, 0.1), "seconds": 500.0,
}  # fmt: skip
STATUS = """
import runpy
found = []
for path in {paths}:
    sys.argv[1:] = ["--from", path]
    try:
        runpy.run_path({script!r}, run_name="__main__")
        found.append(0)
    except SystemExit as error:
        found.append(1 if error.code else 0)
print(found)
"""


def run(*arguments, cwd, **environment):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


def say(tmp_path, program, **environment):
    """What a program prints that uses a benchmark's functions, in a separate process."""
    (tmp_path / "program.py").write_text(f"import sys; sys.path.insert(0, {str(BENCH)!r})\n{program}")
    done = run(tmp_path / "program.py", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def statuses(tmp_path, script, paths):
    """The exit status of this benchmark for the files of these earlier runs: 0, or 1 for any other."""
    program = STATUS.format(script=str(BENCH / script), paths=[str(path) for path in paths])
    return json.loads(say(tmp_path, program).splitlines()[-1])


def check_paste(now, before, mark, lines):
    """A page has each of the lines once, and nothing was changed outside of the marks."""
    begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->\n"
    assert [line for line in lines if now.count(line) != 1] == []
    assert now.partition(begin)[0] == before.partition(begin)[0]
    assert now.partition(end)[2] == before.partition(end)[2]
