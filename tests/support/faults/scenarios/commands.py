"""The commands that look at all arenas of the machine."""

from __future__ import annotations

import contextlib
import io
import re

import shmsync
from shmsync import cli
from support.faults.faults import Scenario, need
from support.jobs import engine
from support.processes import segment_path

from .publisher import NAME


class List(Scenario):
    """There are a living arena and a dead one, which any other new publisher of this machine may remove."""

    command: tuple[str, ...] = ("list", "--interval", "0")

    def __init__(self, start):
        self.trainer, self.victim = start(2)
        self.handle = self.trainer.call(engine.open_arena, 3, name=NAME)
        self.leave_one()

    def leave_one(self):
        self.victim.call(engine.open_arena, 1, name=f"{NAME}-dead")
        self.copy = segment_path(f"{NAME}-dead").read_bytes()
        self.victim.kill()

    def prepare(self):
        segment_path(f"{NAME}-dead").write_bytes(self.copy)

    def act(self):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
            status = cli.main(self.command)
        self.said = said.getvalue()
        need(status in (0, 1), f"status {status}")
        if status == 0:
            need(f"{NAME} " in self.said or f"kept {NAME}:" in self.said, f"{NAME} is left out of\n{self.said}")
            dead = f"{NAME}-dead"
            need(dead in self.said or not segment_path(dead).exists(), f"{dead} is left out of\n{self.said}")

    def check(self, error):
        need(segment_path(NAME).exists(), "a living arena lost its name")
        need(not re.search(rf"^{NAME} +dead", self.said, re.M), "a living one is shown as dead")
        with shmsync.Subscriber(self.handle) as sub:
            need(engine.read(sub) == (3, 3, 3), "the living arena changed")

    def restore(self):
        segment_path(f"{NAME}-dead").unlink(missing_ok=True)

    def end(self):
        self.trainer.call(engine.close_publisher)


class Gc(List):
    command = ("gc",)
