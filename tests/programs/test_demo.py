"""The main job, run as a user would: it trains, and goes on without a killed actor."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.processes import until
from support.programs.programs import members, with_weights

pytest.importorskip("gymnasium", reason="the demo needs shmsync[demo]")


@pytest.fixture
def demo(tmp_path):
    """demo(*options) starts it in a separate session, so that a Ctrl-C can be sent to all of its processes."""
    started = []

    def start(*options):
        command = [sys.executable, "-m", "shmsync", "demo", "--out", str(tmp_path), *options]
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


def actors(process):
    return with_weights(members(process.pid), process.pid)


def figures(folder):
    return json.loads((Path(folder) / "figures.json").read_text())["results"]


@pytest.mark.slow
def test_demo_trains_and_goes_on_without_a_killed_actor(demo, tmp_path):
    process = demo("--target", "60")
    until(lambda: len(actors(process)) == 4 or process.poll() is not None)
    actors(process)[0].send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    result = figures(tmp_path)
    assert result["mean_return"] >= 60
    assert result["torn_reads_acted_upon"] == 0 and result["versions"] > 10
    assert len(result["actors_lost"]) == 1
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "SIGKILL" in output and "Error" not in output
    until(lambda: members(process.pid) == [])  # the fork server goes a moment later
