"""What became of a version: who applied it, who did not, and the sentences that say so.

Every error about workers is composed here, whether they answer through the reader table, a pipe or another machine.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import _native
from ..errors import AckTimeout, ManifestMismatch, ShmSyncError, WorkerDied
from ..memory.control import reader_table
from ..memory.control.reader_table import RowId
from ..memory.system.process import pid_of


class Failure(NamedTuple):
    """An exception on its way from a worker to its sender."""

    tag: Any  # of the message that could not be applied; None where messages have none
    error: bytes | None  # pickled; None when it cannot be
    summary: str  # one line
    trace: str  # as the worker would print it
    leaves: tuple[str, ...] = ()  # which speak against the weights, as far as is known

    @classmethod
    def of(cls, error: BaseException, tag: Any = None) -> Failure:
        """Pack an exception that was just caught."""
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        if isinstance(error, ShmSyncError):  # its notes are for the end of a traceback
            summary = summary.partition(f"\nhelp: {error.help}")[0]
        if not isinstance(error, Exception):  # a worker's Ctrl-C or exit() must not end its sender
            return cls(tag, None, summary, traceback.format_exc())
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)  # some exceptions can be pickled but not unpickled
        except Exception:
            packed = None
        leaves = error.leaves if isinstance(error, ManifestMismatch) else ()
        return cls(tag, packed, summary, traceback.format_exc(), leaves)

    def exception(self) -> BaseException:
        """The worker's exception, or a RuntimeError that quotes it."""
        if self.error is not None:
            try:
                error = pickle.loads(self.error)
                if isinstance(error, BaseException):
                    return error
            except Exception:  # its class is not here
                pass
        return RuntimeError(self.summary)


class RemoteTraceback(Exception):
    """The tracebacks of workers, as the cause of the exception that one of them raised."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class Wording(NamedTuple):
    """The sentences that one way of sending puts into its errors, beside who is missing."""

    late_hint: str  # when a worker applies, or what may keep it
    sent: str = "was sent"
    died: str = "died"
    apply: str = "apply it"
    applying: str = "applying it"
    after_death: str = "The next send goes on without the dead; start others in their place"
    after_lateness: str = "Late answers are ignored: send again, or give more time with timeout="


class Outcome:
    """Who did what by the deadline. Workers are named by their index, others in words."""

    def __init__(self, wording: Wording) -> None:
        self.done: list[Any] = []
        self.late: list[Any] = []
        self.dead: dict[Any, str] = {}  # how each of them died, or ""
        self.failed: dict[Any, Failure | str] = {}  # a string: it answered something else
        self.notes: list[str] = []  # more about the late
        self._wording = wording

    def check(self, what: str, version: int | None) -> None:
        """Raise what went wrong, if anything did: a worker's own exception first, then deaths, then the late."""
        if self.failed:
            self._raise_failure(what)
        if self.dead:
            raise self.death(what, version)
        if self.late:
            raise self.lateness(what, version)

    def death(self, what: str, version: int | None) -> WorkerDied:
        """The error that names the dead."""
        words = self._wording
        late = f"; late: {listed(self.late)}" if self.late else ""
        return WorkerDied(
            f"{what} {words.sent}, but {_with_cause(self.dead)} {words.died} before {words.applying}{late}. "
            f"{words.after_death}",
            version=version,
            missing=[*self.dead, *self.late],
        )

    def lateness(self, what: str, version: int | None) -> AckTimeout:
        """The error that names the late."""
        words = self._wording
        dead = [f"dead: {_with_cause(self.dead)}"] if self.dead else []
        return AckTimeout(
            f"{what} {words.sent}, but {listed(self.late)} did not {words.apply} in time; "
            + "; ".join([*self.notes, *dead, words.late_hint])
            + f". {words.after_lateness}",
            version=version,
            missing=[*self.late, *self.dead],
        )

    def _raise_failure(self, what: str) -> None:
        worker, failure = next(iter(self.failed.items()))
        if isinstance(failure, str):
            raise RuntimeError(f"{listed([worker])} was sent {what}, but {failure} instead of 'updated'")
        texts = [
            f"{listed([index])} failed while it applied {what}:\n{each.trace}"
            for index, each in self.failed.items()
            if isinstance(each, Failure)
        ]
        texts += [f"dead: {_with_cause(self.dead)}"] if self.dead else []
        texts += [f"late: {listed(self.late)}"] if self.late else []
        raise failure.exception() from RemoteTraceback("\n".join(texts))


def listed(names: Sequence[Any]) -> str:
    """Names for a sentence: an int is a worker's index, a string stands for itself."""
    return ", ".join(f"worker {name}" if isinstance(name, int) else name for name in names)


def _with_cause(dead: Mapping[Any, str]) -> str:
    return ", ".join(f"{listed([name])} ({how})" if how else listed([name]) for name, how in dead.items())


def name_with_pid(control: _native.Control, row: RowId) -> str:
    """How a sentence names a row: with the pid in any case."""
    name, pid = reader_table.name_of(control, row), f"pid {pid_of(row[1])}"
    return pid if name == pid else f"{listed([name])} ({pid})"
