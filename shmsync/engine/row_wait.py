"""One wait over the reader table: until the rows that a call asks about are done, or their processes are dead.

Acks and attachment wait here; each says when a row is done, and how to sleep between two looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from .. import _native
from ..memory.control.reader_figures import RowId
from ..memory.system.process import Peers, ProcessState, pid_of
from .outcome import Outcome, Wording

NAP = 0.0005  # seconds between two looks, where nothing wakes the wait


class RowWait:
    """The rows that a call asks about, as they were at the last look.

    Args:
        asked: the rows, for as long as their owners keep them.
        workers: instead of rows, the indices of workers, attached or not.
        done: has this row, which may be given back already, done what it is asked for? None: to be attached is enough,
            and lasts as long as its process lives.
        dead: processes that died before, by their rows, with the names that errors give them.

    Attributes:
        done: the rows that were done, by name.
        late: the rows of living processes that are not done.
        absent: the workers that have no row.
    """

    def __init__(
        self,
        control: _native.Control,
        peers: Peers,
        asked: Iterable[RowId],
        workers: list[int] | None,
        done: Callable[[_native.Row], bool] | None,
        dead: Mapping[RowId, int | str] | None = None,
    ) -> None:
        self._control, self._peers, self._is_done = control, peers, done
        self._asked, self._workers = set(asked), workers
        self._dead = dict(dead or {})
        self.done: dict[int | str, _native.Row] = {}
        self.late: list[RowId] = []
        self.absent: list[int] = []

    def until(self, deadline: float, check: Callable[[], None], nap: Callable[[], object]) -> None:
        """Wait until no row is late and no worker absent, at most until the deadline.

        `check` raises what else should end the wait; `nap` sleeps until the next look.
        """
        waiting = self._look(deaths=False)  # to find a death costs system calls, and most rows are done after one nap
        while waiting:
            nap()
            waiting = self._look(deaths=True)
            if waiting:
                check()
                if time.monotonic() >= deadline:
                    return

    @property
    def dead(self) -> dict[RowId, int | str]:
        """The rows of processes that died, where no other process has taken the worker's place."""
        late = {self._control.name_of(row) for row in self.late}
        return {row: name for row, name in self._dead.items() if name not in self.done and name not in late}

    def outcome(self, wording: Wording) -> Outcome:
        """What the last look has found, for an error."""
        outcome = Outcome(wording)
        outcome.dead = dict.fromkeys(self.dead.values(), "")
        owners = {self._control.name_of(row): row[1] for row in self.late}
        outcome.late = [*owners, *self.absent]
        outcome.pids = {name: pid_of(owner) for name, owner in owners.items()}
        outcome.stopped = [name for name, owner in owners.items() if self._peers.state(owner) is ProcessState.STOPPED]
        outcome.absent = list(self.absent)
        return outcome

    def _look(self, *, deaths: bool) -> bool:
        """Look at all rows once. Is there anything to wait for?"""
        if self._is_done is None:
            self.done.clear()
        self.late = []
        for row in self._control.rows(left=True):
            if self._asks(row) and not self._is_over(row, deaths):
                self.late.append(row.id)
        known = {*self.done, *self._dead.values(), *map(self._control.name_of, self.late)}
        self.absent = [worker for worker in self._workers or () if worker not in known]
        return bool(self.late or self.absent)

    def _asks(self, row: _native.Row) -> bool:
        if row.id in self._dead:
            return False
        if self._workers is None:  # also a process that has replaced a dead worker
            return row.id in self._asked or row.worker in self._dead.values()
        return row.worker in self._workers

    def _is_over(self, row: _native.Row, deaths: bool) -> bool:
        """Is there nothing to wait for in this row, since it is done, given back, or its process is dead?"""
        if self._is_done is None:
            if row.owner and self._peers.alive(row.owner):
                self.done[row.name] = row
            return True
        if self._is_done(row):
            self.done[row.name] = row
            return True
        if row.owner == 0:
            return True
        if not deaths or self._peers.alive(row.owner):
            return False
        last = self._control.row(row.number)  # it may have done it after the look, and then died
        if last.owner != row.owner or self._is_done(last):
            return False  # the next look finds out
        self._dead[row.id] = row.name
        return True
