"""`shmsync top` on real terminals, through pipes and without either. It leaves the terminal as it was."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from support.jobs.engine import attach, begin_update, close_publisher, enter, open_arena, publish, refresh
from support.processes import state, until
from support.programs.terminal import Terminal
from support.weights import stamps


def publish_for_ever(state):
    while True:
        state.pub.publish()
        time.sleep(0.001)


def read_for_ever(state):
    while True:
        with state.sub.read() as section:
            low, high = stamps(section.weights)
            assert low == high == section.version


pytest.importorskip("rich", reason="top draws with shmsync[top]")


def run(*arguments):
    """The command without a terminal."""
    return subprocess.run([sys.executable, "-m", "shmsync", *arguments], capture_output=True, text=True, cwd="/")


@pytest.fixture
def policy(start, name):
    """An arena of three slots with readers 0 and 1, and its processes."""
    trainer, slow, quick = start(3)
    handle = trainer.call(open_arena, 1, name=name, slots=3)
    for index, worker in enumerate((slow, quick)):
        worker.call(attach, handle, worker=index)
        worker.call(refresh)
    return trainer, slow, quick


def test_it_draws_the_readers_and_gives_the_terminal_back(policy, name):
    trainer, slow, quick = policy
    slow.call(enter)
    quick.start(read_for_ever)
    trainer.start(publish_for_ever)
    with Terminal("top", name, "--interval", "0.1") as terminal:
        late = f"worker 0 (pid {slow.pid}) is furthest behind"
        frame = terminal.until(lambda text: late in text)
        assert any(re.match(r" +0 .*live", line) for line in frame)
        assert not terminal.restored()
        terminal.press("\x03")
        assert terminal.ended() == 130
        assert terminal.restored()
        assert "Traceback" not in terminal.text


def test_who_blocks_the_publisher_stands_in_front(start, name):
    trainer, holder, other = start(3)
    handle = trainer.call(open_arena, 1, name=name, timeout=3600.0)
    other.call(attach, handle, worker=0)
    holder.call(attach, handle, worker=7)
    holder.call(enter)
    trainer.start(begin_update, 2)  # it waits for the section
    until(lambda: state(trainer.pid) == "S")
    with Terminal("top", name, "--interval", "0.05", columns=100, lines=14) as terminal:
        frame = terminal.until(lambda text: f"worker 7 (pid {holder.pid}) blocks the publisher" in text)
        rows = [line for line in frame if re.match(r"[> ] +[07] ", line)]
        assert rows[0].startswith(">") and rows[0].split()[1] == "7"
        holder.stop()
        stopped = f"worker 7 (pid {holder.pid}, stopped)"
        terminal.until(lambda text: f"{stopped} blocks the publisher: " in " ".join(text.split()))
    with Terminal("top", "--interval", "0.05", columns=140, lines=14) as terminal:
        terminal.until(lambda text: name in text and stopped in text)
    assert "(1 stopped)" in run("list").stdout
    assert f"{stopped} blocks the publisher: " in run("top", name, "--count", "1").stdout


def test_a_pipe_is_told_of_the_end(policy, name):
    trainer, *_ = policy
    command = [sys.executable, "-m", "shmsync", "top", name, "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        assert name in process.stdout.readline()
        trainer.call(publish, 2)
        while "version 2" not in process.stdout.readline():
            pass
        trainer.call(close_publisher)
        assert process.stdout.read().splitlines()[-1] == f"arena {name} has ended"
        assert process.wait() == 0


def test_mistakes_are_said_before_anything_is_drawn(name):
    done = run("top", name)
    assert done.returncode == 1 and f"there is no arena '{name}'" in done.stderr
    done = run("top", "--interval", "-1")
    assert done.returncode == 2 and "between 0 and 3600" in done.stderr
