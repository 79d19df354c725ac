"""The commands that look at arenas, and `import shmsync`, import no torch. Trainers and workers: test_quickstart.py."""

from __future__ import annotations

import os
import pickle
import pty
import subprocess
import sys

import pytest
import torch

import shmsync

HEAVY = {"torch", "tensordict", "numpy", "sympy", "torchrl", "gymnasium", "ray"}


def imported(*arguments):
    """The top-level packages that a Python with these arguments imports, as -X importtime lists them."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, cwd="/")
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if line not in lines]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("command", [["inspect", "NAME"], ["top", "NAME", "--count", "1"], ["doctor"]], ids=" ".join)
def test_a_command_imports_no_torch(command):
    weights = {name: torch.zeros(3, dtype=getattr(torch, name)) for name in ("float32", "bfloat16", "int64", "bool")}
    with shmsync.Publisher(weights) as pub:
        found = imported("-m", "shmsync", *(pub.name if word == "NAME" else word for word in command))
    assert "shmsync" in found
    assert found & HEAVY == set()
    assert "rich" not in found  # no terminal, so nothing is drawn


def test_what_needs_no_torch_imports_none():
    handle = f"pickle.loads({pickle.dumps(shmsync.Handle('policy', b'1'))!r}).session"
    light = f"import pickle, shmsync; from shmsync import AckTimeout, ReadSection; dir(shmsync); {handle}"
    assert imported("-c", light) & HEAVY == set()


def test_a_missing_package_is_one_line_that_names_its_extra():
    program = "import sys; sys.modules['rich'] = None; from shmsync import cli; sys.exit(cli.main(['top']))"
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=theirs, stderr=subprocess.PIPE, text=True, cwd="/",
            env=os.environ | {"TERM": "xterm-256color"},
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "needs rich" in line and ": pip install 'shmsync[top]'" in line
