"""The main job, run as a user would: it trains, ends on Ctrl-C, and goes on without a killed actor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.processes import until

pytest.importorskip("gymnasium", reason="the demo needs shmsync[demo]")

full = pytest.mark.full


@pytest.fixture
def demo(tmp_path):
    """demo(*options) starts it in a session of its own, so that a Ctrl-C can be sent to all of its processes."""
    started = []

    def start(*options):
        command = [sys.executable, "-m", "shmsync.cli", "demo", "--out", str(tmp_path), *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        for member in members(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        process.stdout.close()


def members(session):
    """Every process of a session; the demo's actors are in the one that it leads."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                found.append(process)
        except ProcessLookupError:
            pass
    return found


def actors(process):
    """The processes that have the slab mapped, but for the learner itself."""
    found = []
    for member in members(process.pid):
        try:
            maps = Path(f"/proc/{member.pid}/maps").read_text()
        except OSError:
            continue
        if member.pid != process.pid and "memfd:shmsync:" in maps:
            found.append(member)
    return found


def figures(folder):
    return json.loads((Path(folder) / "figures.json").read_text())["results"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--slots", "1"), id="--slots 1"),
        pytest.param(
            ("--slots", "2", "--consistency", "optimistic"), id="--slots 2 --consistency optimistic", marks=full
        ),
    ],
)
def test_demo_trains_without_acting_on_torn_weights(demo, tmp_path, options):
    process = demo("--target", "150", "--workers", "2", *options)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "the target was reached" in output
    result = figures(tmp_path)
    assert result["mean_return"] >= 150
    assert result["torn_reads_acted_upon"] == 0
    assert result["versions"] > 10
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    until(lambda: members(process.pid) == [])  # the fork server goes a moment later


def test_interrupt_ends_the_demo_cleanly(demo, tmp_path):
    process = demo("--target", "501")
    until(lambda: len(actors(process)) == 4 or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "versions" in output  # the closing table
    until(lambda: members(process.pid) == [])  # the fork server goes a moment later


def test_demo_goes_on_without_a_killed_actor(demo, tmp_path):
    process = demo("--target", "200")
    until(lambda: len(actors(process)) == 4 or process.poll() is not None)
    actors(process)[0].send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    result = figures(tmp_path)
    assert result["mean_return"] >= 200
    assert len(result["actors_lost"]) == 1
    assert "SIGKILL" in output
    until(lambda: members(process.pid) == [])  # the fork server goes a moment later
