"""Pages of the documentation as their readers follow them: the files that a page shows, and the commands to run.

A block with a title is a file: it is written when a reader comes to it. A `console` block is a run: each line that
begins with "$ " is typed, and what stands below it is what it prints. "..." stands for anything. Where numbers differ
from run to run, the comment `<!-- numbers differ -->` stands before the block, and any number will do for a number.
"""

from __future__ import annotations

import doctest
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from support.processes import until
from support.programs.programs import members

BLOCK = re.compile(
    r"(?P<loose><!-- numbers differ -->\n+)?^```(?P<kind>[\w-]+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e-\d+)?")


class File(NamedTuple):
    """What the page says to write."""

    name: str
    text: str


class Typed(NamedTuple):
    """What the page says to type, and to see."""

    command: str
    output: str
    loose: bool


def steps(page: Path) -> list[File | Typed]:
    """The files and commands of a page, in their order."""
    found: list[File | Typed] = []
    for block in BLOCK.finditer(page.read_text()):
        if block["title"]:
            found.append(File(block["title"], block["text"]))
        elif block["kind"] == "console":
            for typed in re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]:
                command, _, output = re.sub(r"\\\n> ", "", typed).partition("\n")
                found.append(Typed(command, output, bool(block["loose"])))
    return found


def same(want: str, got: str, loose: bool) -> bool:
    """Is this the output that the page shows?"""
    if loose:
        want, got = NUMBER.sub("1", want), NUMBER.sub("1", got)
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


class Reader:
    """A user who follows a page in an empty directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV", "OMP_"))}
        self.environment = {**ours, "PATH": f"{Path(sys.executable).parent}:{ours['PATH']}"}

    def follow(self, page: Path, leave_out: str = r"pip install|docker |kubectl ") -> int:
        """Write and type what the page says, and compare. Returns how many commands were run."""
        done = 0
        for step in steps(page):
            if isinstance(step, File):
                path = self.directory / step.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(step.text)
            elif not re.search(leave_out, step.command):
                output = self.type(step.command)
                assert same(step.output, output, step.loose), (
                    f"$ {step.command}\n{output}\n-- but the page shows\n{step.output}"
                )
                done += 1
        return done

    def type(self, command: str) -> str:
        """What a command prints. It has to end well, without a traceback, and to leave no process."""
        shell = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = shell.communicate(timeout=250)
            assert shell.returncode == 0, f"$ {command}\n{output}{errors}"
            assert not re.search("Traceback|ResourceWarning", errors), errors
            until(lambda: not members(shell.pid))  # the resource tracker goes a moment later
            return output
        finally:
            for process in members(shell.pid):
                process.send_signal(signal.SIGKILL)
            shell.wait()
