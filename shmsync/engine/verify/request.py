"""Proof of delivery, in the publisher: asking every worker what it holds, and waiting for the answers.

The question is a number in the publication line, the answer a word in the worker's row. No process is woken for it: a
worker sees the question when it next enters a section.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from ... import _native
from ...errors import NotDelivered, WriterBusy
from ...memory.arena import Arena
from ...memory.system.process import Peers
from ..outcome import Outcome, Wording, listed
from ..row_wait import NAP, RowWait
from .compare import Proof, Verdict

_WORDING = Wording(
    "a worker answers at its next section or refresh()",
    sent="is published",
    after_death="Start the dead again",
    after_lateness="Give more time with timeout=",
    do="answer",
    doing="answering",
)
_BUSY = (
    "another call of verify() of this Publisher is under way, in another thread or, from a signal handler, in this "
    "one; let it end first"
)
_LAST = (1 << 32) - 1


class VerifyRequest:
    """The questions of one publisher, one at a time."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._number = 0
        self._turn = _native.FifoLock()

    def ask(self, workers: list[int] | None, version: int, deadline: float, check: Callable[[], None]) -> Proof:
        """Ask these workers (None: who is attached now) and wait. `check` raises what else should end the wait."""
        try:
            with _native.ScopedLock([self._turn], deadline, _BUSY, _BUSY):
                rows, outcome = self._answers(workers, deadline, check)
        except WriterBusy as error:
            if error.version is None:  # of the lock; what `check` raises says it itself
                error.version = version
            raise
        manifest, what = self._arena.manifest, f"version {version}"
        found = {name: Verdict.problem(row.found, manifest) for name, row in rows.done.items()}
        wrong = {name: problem for name, problem in found.items() if problem[0]}
        if wrong:
            parts = [f"{listed([name])} {problem}" for name, (problem, _) in wrong.items()]
            raise NotDelivered(
                f"{what} is published, but {'; '.join(parts + outcome.about_dead() + outcome.about_late())}. "
                "sub.verify() in the worker names every leaf",
                version=version,
                missing=[*wrong, *outcome.dead, *outcome.late],
                leaves=dict.fromkeys(leaf for _, leaf in wrong.values() if leaf),
            )
        outcome.check(what, version)
        return Proof(version, len(manifest.leaves), workers=tuple(rows.done))

    def _answers(
        self, workers: list[int] | None, deadline: float, check: Callable[[], None]
    ) -> tuple[RowWait, Outcome]:
        control = self._arena.control
        question = self._number = self._number % _LAST + 1
        try:
            control.ask(question)
            with closing(Peers()) as peers:
                asked = [row.id for row in control.rows()] if workers is None else ()
                rows = RowWait(control, peers, asked, workers, lambda row: row.question == question)
                rows.until(deadline, check, lambda: time.sleep(NAP))
                return rows, rows.outcome(_WORDING)
        finally:
            if self._arena.mapped:
                control.ask(0)  # a late worker need not read all weights for a proof that has ended
