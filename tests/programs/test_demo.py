"""The main job, run as a user would: it trains, ends on Ctrl-C, and goes on without a killed actor."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import shmsync
from support.processes import until
from support.programs.programs import members, with_weights

pytest.importorskip("gymnasium", reason="the demo needs shmsync[demo]")


@pytest.fixture
def demo(tmp_path):
    """demo(*options) starts it in a separate session, so that a Ctrl-C can be sent to all of its processes."""
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


def actors(process):
    return with_weights(members(process.pid), process.pid)


def figures(folder):
    return json.loads((Path(folder) / "figures.json").read_text())["results"]


@pytest.mark.full  # `make test` trains once, below, with one slot
def test_demo_trains_without_acting_on_torn_weights(demo, tmp_path):
    process = demo("--target", "150", "--workers", "2", "--slots", "2", "--consistency", "optimistic")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "the target was reached" in output
    result = figures(tmp_path)
    assert result["mean_return"] >= 150
    assert result["torn_reads_acted_upon"] == 0
    assert result["versions"] > 10
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    until(lambda: members(process.pid) == [])  # the fork server goes a moment later


@pytest.mark.full  # collectors/test_interrupts.py interrupts a collector
def test_interrupt_ends_the_demo_cleanly(demo, tmp_path):
    process = demo("--target", "501")
    until(lambda: len(actors(process)) == 4 or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "versions" in output  # the closing table
    until(lambda: members(process.pid) == [])  # the fork server goes a moment later


def test_demo_goes_on_without_a_killed_actor(demo, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # of the pipe, which gets every line all the same
    process = demo("--target", "150")
    until(lambda: len(actors(process)) == 4 or process.poll() is not None)
    actors(process)[0].send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    result = figures(tmp_path)
    assert result["mean_return"] >= 150
    assert result["torn_reads_acted_upon"] == 0 and result["versions"] > 10
    assert len(result["actors_lost"]) == 1
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "SIGKILL" in output and "Error" not in output
    until(lambda: members(process.pid) == [])  # the fork server goes a moment later


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_small_terminal_shows_every_actor_and_how_far_it_is(tmp_path, encoding):
    from shmsync.examples.cartpole.dashboard import Dashboard
    from shmsync.examples.cartpole.figures import Figures
    from shmsync.examples.cartpole.fleet import Actor, Fleet, Lost
    from shmsync.examples.cartpole.options import Options
    from shmsync.examples.cartpole.rollout import Message

    console_module = pytest.importorskip("rich.console", reason="the dashboard needs rich, which shmsync[demo] brings")
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    console = console_module.Console(
        file=stream, width=36, height=14, force_terminal=True, color_system=None, legacy_windows=False
    )
    figures, fleet = Figures(), Fleet()
    figures.env_steps = 123_456
    figures.recent.extend([237.5] * 100)
    with shmsync.Publisher({"t": torch.ones(3)}) as pub, shmsync.Subscriber(pub.handle) as sub:
        for worker in range(12):
            last = None if worker == 3 else Message(0, [], sub.stats(), 0)
            fleet.actors.append(Actor(worker, None, None, [], last))
        fleet.lost.append(Lost(1, 77, -9, 2.0))
        with Dashboard(console, Options(target=475, out=tmp_path), figures, fleet, pub) as dashboard:
            dashboard.tick()
        stream.flush()
        drawn = stream.buffer.getvalue().decode(encoding).replace("\r", "")
    drawn = re.sub(r"\x1b\[[0-9;?]*A", "\n", drawn)  # up a line: the next frame begins
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    last = [line for line in drawn.split("\n") if line.strip()][-13:]
    assert all(len(line.rstrip()) <= 36 for line in last)
    assert any(re.match(r"return \[#+\.+\] 238 of 475", line) for line in last)
    assert any(line.split()[:3] == ["0", "1", "0"] for line in last)
    assert any(line.split() == ["1", "lost:", "exit", "code", "-9"] for line in last)
    assert any(line.split() == ["3", "starting"] for line in last)
    assert any(re.match(r"and \d+ more", line) for line in last)


def test_the_plot_has_return_lag_and_publish_and_no_legend_covers_data(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, which shmsync[demo] brings")
    from matplotlib.figure import Figure
    from shmsync.examples.cartpole import report
    from shmsync.examples.cartpole.figures import Figures
    from shmsync.examples.cartpole.options import Options

    figures = Figures()
    for step in range(300):
        figures.episodes.append((step, float(step)))
        figures.lags.append((step, 0, 1.0, 9))
        figures.publishes.append((step, 1e-5))
    drawn = []
    save = Figure.savefig

    def saved(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", saved)
    report.draw(Options(out=tmp_path), figures)
    (figure,) = drawn
    assert [axes.get_ylabel().split()[0] for axes in figure.axes] == ["return", "policy", "publish"]
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert not legend.overlaps(axes.get_window_extent())
        assert legend.x1 <= figure.bbox.x1
