"""Proof of delivery, in the publisher: asking every worker what it holds, and waiting for the answers.

The question is a number in the publication line, the answer a word in the worker's row. No process is woken for it: a
worker sees the question when it next enters a section.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import AckTimeout, NotDelivered, WorkerDied, WriterBusy
from ...memory.arena import Arena
from ...memory.control import reader_table
from ...memory.control.reader_table import RowId
from ...memory.system.process import Peers, ProcessState
from ..outcome import listed, name_with_pid
from .local import Proof, Verdict

_NAP = 0.0005
_LAST = (1 << 32) - 1


class VerifyRequest:
    """The questions of one publisher, one at a time."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._number = 0
        self._turn = threading.Lock()

    def ask(self, workers: list[int] | None, version: int, deadline: float, check: Callable[[], None]) -> Proof:
        """Ask these workers (None: who is attached now) and wait. `check` raises what else should end the wait."""
        with self._asking(deadline, version) as question:
            answers = _Answers(self._arena, question, workers)
            try:
                while answers.look():
                    check()
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(_NAP)
                return answers.judged(version)
            finally:
                answers.close()

    @contextmanager
    def _asking(self, deadline: float, version: int) -> Iterator[int]:
        if not self._turn.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
            raise WriterBusy("another thread is in verify() of this Publisher; let it finish first", version=version)
        try:
            self._number = self._number % _LAST + 1
            self._arena.control.ask(self._number)
            yield self._number
        finally:
            if self._arena.mapped:
                self._arena.control.ask(0)  # a late worker need not read all weights for a proof that has ended
            self._turn.release()


class _Answers:
    def __init__(self, arena: Arena, question: int, workers: list[int] | None) -> None:
        self._arena, self._control, self._question = arena, arena.control, question
        self._workers = workers
        self._peers = Peers()
        self._open: set[RowId] = {row.id for row in reader_table.claimed(self._control)} if workers is None else set()
        self._names: dict[RowId, int | str] = {}
        self._done: dict[int | str, tuple[str, str]] = {}  # what an answer says is wrong, and which leaf
        self._dead: dict[RowId, int | str] = {}

    def look(self) -> bool:
        """Read the answers that have arrived; True while one is missing."""
        rows = {row.id: row for row in reader_table.claimed(self._control)}
        if self._workers is not None:
            self._open = {row.id for row in rows.values() if row.worker in self._workers}
        for row in sorted(self._open):
            question, found = self._control.answer(row[0])
            if row not in rows:  # it has left, or died and another worker has its row: looked at before its answer was
                self._open.discard(row)
            elif question == self._question:
                name = self._names.setdefault(row, reader_table.name_of(self._control, row))
                self._done[name] = Verdict.problem(found, self._arena.manifest)
                self._dead.pop(row, None)
                self._open.discard(row)
            elif not self._peers.alive(row[1]):
                if self._control.answer(row[0])[0] == self._question:
                    continue  # it answered and then died: the next look takes it in
                self._dead[row] = reader_table.name_of(self._control, row)
                self._open.discard(row)
        return bool(self._open or self._absent())

    def _absent(self) -> list[int]:
        known = {*self._done, *self._dead.values()}
        return [worker for worker in self._workers or () if worker not in known]

    def judged(self, version: int) -> Proof:
        """The proof, or the error that names who holds something else, is dead, or has not answered."""
        wrong = {name: found for name, found in self._done.items() if found[0]}
        late = sorted(self._open)
        named = [reader_table.name_of(self._control, row) for row in late]
        absent = [worker for worker in self._absent() if worker not in named]
        dead = [name for name in self._dead.values() if name not in self._done]
        parts = [f"{listed([name])} {what}" for name, (what, _) in wrong.items()]
        parts += [f"{listed(dead)} died before answering"] if dead else []
        parts += [f"{', '.join(map(self._described, late))} did not answer in time"] if late else []
        parts += [f"{listed(absent)} {'is' if len(absent) == 1 else 'are'} not attached"] if absent else []
        if not parts:
            return Proof(version, len(self._arena.manifest.leaves), workers=tuple(self._done))
        text = f"version {version} is published, but " + "; ".join(parts)
        missing = [*wrong, *dead, *named, *absent]
        if wrong:
            leaves = dict.fromkeys(leaf for _, leaf in wrong.values() if leaf)
            raise NotDelivered(
                f"{text}. sub.verify() in the worker names every leaf", version=version, missing=missing, leaves=leaves
            )
        if dead:
            raise WorkerDied(f"{text}. Start the dead again", version=version, missing=missing)
        raise AckTimeout(
            f"{text}. A worker answers at its next section or refresh(); give more time with timeout=",
            version=version,
            missing=missing,
        )

    def _described(self, row: RowId) -> str:
        stopped = self._peers.state(row[1]) is ProcessState.STOPPED
        return name_with_pid(self._control, row) + (", which is stopped," if stopped else "")

    def close(self) -> None:
        """Close the pidfds."""
        self._peers.close()
