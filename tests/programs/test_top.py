"""`shmsync top` on real terminals, through pipes and without either. It leaves the terminal as it was."""

from __future__ import annotations

import functools
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from support.jobs.engine import (
    attach,
    begin_update,
    close_publisher,
    enter,
    open_arena,
    publish,
    publish_for_ever,
    read_for_ever,
    refresh,
)
from support.processes import segment_path, state, until
from support.programs import terminal as terminals
from support.programs.terminal import COLOURS, ESCAPES, Terminal

pytest.importorskip("rich", reason="top draws with shmsync[top]")


@pytest.fixture
def terminal_of(server):
    """terminal_of("top", ...) -> the command on a separate terminal."""
    return functools.partial(Terminal, server)


@pytest.fixture
def run(server, tmp_path):
    """run("top", ...) -> status, stdout and stderr of the command without a terminal."""
    return functools.partial(terminals.run, server, tmp_path)


@pytest.fixture
def policy(start, name):
    """An arena of three slots with readers 0 and 1, and its processes."""
    trainer, slow, quick = start(3)
    handle = trainer.call(open_arena, 1, name=name, slots=3)
    for index, worker in enumerate((slow, quick)):
        worker.call(attach, handle, worker=index)
        worker.call(refresh)
    return trainer, slow, quick


@pytest.mark.parametrize(("columns", "lines"), [(36, 14), (120, 40)])
def test_it_draws_what_there_is_room_for(policy, name, columns, lines, terminal_of):
    trainer, slow, quick = policy
    slow.call(enter)
    quick.start(read_for_ever)
    trainer.start(publish_for_ever)
    with terminal_of("top", name, "--interval", "0.1", columns=columns, lines=lines) as terminal:
        late = f"worker 0 (pid {slow.pid}) is furthest behind"
        frame = terminal.until(lambda text: late in " ".join(text.split()) and re.search(r"[▁-█]{3}", text))
        assert len(frame) <= lines
        assert max(map(len, frame)) <= columns
        assert any(re.match(r" +0 .*alive", line) for line in frame)
        assert ("RETRIES" in "".join(frame)) == (columns == 120)
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.restored()


def test_who_blocks_the_publisher_stands_in_front(start, name, terminal_of, run):
    trainer, holder, other = start(3)
    handle = trainer.call(open_arena, 1, name=name, timeout=3600.0)
    other.call(attach, handle, worker=0)
    holder.call(attach, handle, worker=7)
    holder.call(enter)
    trainer.start(begin_update, 2)  # it waits for the section
    until(lambda: state(trainer.pid) == "S")
    with terminal_of("top", name, "--sort", "worker", "--interval", "0.05", columns=60, lines=14) as terminal:
        frame = terminal.until(lambda text: f"worker 7 (pid {holder.pid}) blocks the publisher" in text)
        rows = [line for line in frame if re.match(r"[> ] +[07] ", line)]
        assert rows[0].startswith(">") and rows[0].split()[1] == "7"
        holder.stop()
        stopped = f"worker 7 (pid {holder.pid}, stopped)"
        terminal.until(lambda text: f"{stopped} blocks the publisher: " in " ".join(text.split()))
    status, text, _ = run("top", name, "--count", "1")
    assert status == 0
    assert f"blocked by {stopped} for " in text


def test_all_arenas_and_their_order(start, name, terminal_of):
    one, other = start(2)
    one.call(open_arena, 4, name=name)
    other.call(open_arena, 1, name=f"{name}-b")
    other.start(publish_for_ever)
    with terminal_of("top", "--interval", "0.1") as terminal:
        terminal.until(lambda text: name in text and f"{name}-b" in text and "by name" in text)
        terminal.press("s")
        frame = terminal.until(lambda text: "by rate" in text and re.search(rf"{name}-b .*[▁-█]", text))
        mine = [line.split()[0] for line in frame if line.startswith(name)]
        assert mine == [f"{name}-b", name]
        terminal.press("r")
        terminal.until(lambda text: text.index(f"{name} ") < text.index(f"{name}-b"))
        terminal.press("q")
        assert terminal.ended() == 0


ENDS = {
    "q": lambda terminal, trainer: terminal.press("q"),
    "Ctrl-C": lambda terminal, trainer: terminal.press("\x03"),
    "SIGTERM": lambda terminal, trainer: terminal.signal(signal.SIGTERM),
    "SIGHUP": lambda terminal, trainer: terminal.signal(signal.SIGHUP),
    "its arena ends": lambda terminal, trainer: trainer.call(close_publisher),
}
STATUS = {"Ctrl-C": 130, "SIGTERM": 143, "SIGHUP": 129}


@pytest.mark.parametrize("how", ENDS)
def test_the_terminal_is_as_it_was(policy, name, how, terminal_of):
    trainer, *_ = policy
    with terminal_of("top", name, "--interval", "0.05") as terminal:
        terminal.until(lambda text: "version 1" in text)
        assert not terminal.restored()
        ENDS[how](terminal, trainer)
        assert terminal.ended() == STATUS.get(how, 0)
        assert terminal.restored()
        assert "Traceback" not in terminal.text
        assert (f"arena {name} has ended" in terminal.text) == (how == "its arena ends")


def test_two_interrupts_at_once_leave_the_terminal_as_it_was(policy, name, terminal_of):
    with terminal_of("top", name, "--interval", "0.05") as terminal:
        terminal.until(lambda text: "version 1" in text)
        for _ in range(20):
            terminal.signal(signal.SIGINT)
        terminal.ended()
        assert terminal.restored()


def test_a_stopped_top_gives_the_terminal_back_and_takes_it_again(policy, name, terminal_of):
    with terminal_of("top", name, "--interval", "0.05") as terminal:
        terminal.until(lambda text: "version 1" in text)
        terminal.signal(signal.SIGTSTP)
        until(lambda: state(terminal.pid) == "T")
        terminal.read()
        assert terminal.restored()
        terminal.signal(signal.SIGCONT)
        until(lambda: not (terminal.read() or terminal.restored()))
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.restored()


def test_another_size_is_drawn_at_once(policy, name, terminal_of):
    with terminal_of("top", name, "--interval", "600", columns=120, lines=40) as terminal:
        terminal.until(lambda text: "RETRIES" in text)
        terminal.resize(36, 14)
        frame = terminal.until(lambda text: "RETRIES" not in text)
        assert max(map(len, frame)) <= 36


def test_stopped_and_dead_processes_are_shown(policy, name, terminal_of):
    trainer, slow, quick = policy
    with terminal_of("top", name, "--interval", "0.05") as terminal:
        slow.stop()
        quick.kill()
        terminal.until(lambda text: re.search(r" 0 .*stopped", text) and re.search(r" 1 .*dead", text))
        trainer.stop()
        terminal.until(lambda text: "its publisher is stopped" in text)
        trainer.kill()  # the next publisher of any process sweeps it, and then it has ended
        until(lambda: "its publisher is dead" in terminal.text or not terminal.process.is_alive() or terminal.read())


@pytest.mark.parametrize(
    "environment",
    [{"NO_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1", "TERM": "vt100"}],
    ids=["no colour", "ascii", "neither"],
)
def test_poor_terminals(policy, name, environment, terminal_of):
    trainer, slow, _ = policy
    slow.call(enter)
    trainer.start(publish_for_ever)
    with terminal_of("top", name, "--interval", "0.05", columns=100, **environment) as terminal:
        terminal.until(lambda text: re.search(r"/s +\S+\n", text) and "furthest behind" in text)
        assert ("NO_COLOR" in environment) == (COLOURS.search(terminal.text) is None)
        assert ("PYTHONIOENCODING" not in environment) == ("█" in terminal.text)
        assert "\\u" not in terminal.text


def test_a_dumb_terminal_gets_lines(policy, name, terminal_of):
    with terminal_of("top", name, "--count", "2", "--interval", "0.05", TERM="dumb") as terminal:
        assert terminal.ended() == 0
        assert "\x1b" not in terminal.text
        assert [line.split()[1:5] for line in terminal.text.splitlines()] == [[name, "alive", "version", "1"]] * 2


def test_a_pipe_gets_one_line_each_interval(policy, name, run):
    status, text, errors = run("top", name, "--count", "3", "--interval", "0.05", PYTHONIOENCODING="ascii")
    assert (status, errors) == (0, "")
    lines = text.splitlines()
    assert len(lines) == 3
    assert all(re.match(rf"\d\d:\d\d:\d\d {name} alive version 1 \S+/s readers 2 lag 0$", line) for line in lines)


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


def test_without_keys_it_draws_all_the_same(policy, name, terminal_of):
    with terminal_of("top", name, "--interval", "0.05", "--count", "3", stdin=False) as terminal:
        assert terminal.ended() == 0, terminal.text
        assert "version 1" in terminal.text
        assert terminal.restored()


def test_mistakes_are_said_before_anything_is_drawn(name, run):
    status, _, said = run("top", name)
    assert status == 1
    assert f"there is no arena '{name}'" in said
    status, _, said = run("top", "--sort", "worker")
    assert status == 2
    assert "arenas are sorted by name, rate, lag, readers, not by worker" in said
    status, _, said = run("top", "--interval", "0")
    assert status == 2
    assert "between 0.05 and 3600" in said


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux: apt install tmux")
@pytest.mark.parametrize(("columns", "lines"), [(36, 14), (120, 40)])
def test_in_tmux(policy, name, tmp_path, columns, lines, run):
    """What a terminal makes of it: nothing is cut, nothing scrolls, and the shell's own lines are back afterwards."""
    trainer, slow, _ = policy
    slow.call(enter)
    trainer.start(publish_for_ever)

    def tmux(*arguments):
        command = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def shown():
        time.sleep(0.05)  # a look starts a program, which takes more than a frame of top
        return tmux("capture-pane", "-p", "-t", "top")

    program = f"echo before; {sys.executable} -m shmsync top {name} --interval 0.1; echo status $?; cat"
    tmux("new-session", "-d", "-s", "top", "-x", str(columns), "-y", str(lines), "sh", "-c", program)
    try:
        late = f"worker 0 (pid {slow.pid}) is furthest behind"
        until(lambda: late in " ".join(shown().split()) and shown().splitlines()[-1].startswith("q quit"))
        first = shown().splitlines()[0]
        assert first.startswith(name[: columns - 10])
        assert "before" not in shown()
        tmux("send-keys", "-t", "top", "q")
        until(lambda: "status 0" in shown())
        assert shown().split() == ["before", "status", "0"]
    finally:
        tmux("kill-server")


def test_frames_have_no_control_characters_of_others(start, name, run):
    """A name is safe, but a command line is not; it is shown by list -v and inspect."""
    program = "import sys, shmsync, torch; p = shmsync.Publisher({'t': torch.ones(1)}, name=sys.argv[1]); input()"
    command = [sys.executable, "-c", program, name, "\x1b[31mred\x07"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/") as process:
        until(lambda: segment_path(name).exists() and f"{name} " in run("list", "--interval", "0")[1])
        for arguments in (("inspect", name), ("list", "-v")):
            _, text, _ = run(*arguments, "--interval", "0")
            assert ESCAPES.search(text) is None
            assert "\x07" not in text
        process.communicate(b"\n")


@pytest.mark.parametrize("columns", [36, 120])
def test_list_and_inspect_fit_the_terminal(policy, name, terminal_of, columns):
    for command in (["list"], ["list", "-v"], ["inspect", name]):
        with terminal_of(*command, "--interval", "0", columns=columns) as terminal:
            assert terminal.ended() == 0
            lines = terminal.text.split("\r\n")
            assert [line for line in lines if len(line) > columns] == []
            assert any(re.match(rf"(arena )?{name}", line) for line in lines)
