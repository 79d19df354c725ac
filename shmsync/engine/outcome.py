"""What became of a version: the workers that applied it, those that did not, and the sentences of the errors.

The errors of a wait for workers are composed here, whether they answer through the reader table (write/acks.py), a pipe
or another machine. What is refused or given up before such a wait begins has its error at that place.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import AckTimeout, ShmSyncError, WorkerDied
from ..memory.process import Peer


class Failure(NamedTuple):
    """An exception on its way from a worker to its sender."""

    tag: Any  # of the message that could not be applied; None where messages have none
    error: bytes | None  # pickled; None when it cannot be
    summary: str  # one line
    trace: str  # as the worker would print it

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
        return cls(tag, packed, summary, traceback.format_exc())

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
    after_death: str = "The next send goes on without the dead; start others in their place"
    after_lateness: str = "Late answers are ignored: send again, or give more time with timeout="
    do: str = "apply it"
    doing: str = "applying it"
    after_stop: str = ""  # what helps besides `kill -CONT`


class Outcome:
    """What each process did by the deadline. Workers are named by their index, others in words."""

    def __init__(self, wording: Wording) -> None:
        self.done: list[Any] = []
        self.late: list[Any] = []
        self.dead: dict[Any, str] = {}  # how each of them died, or ""
        self.failed: dict[Any, Failure | str] = {}  # a string: what it did instead
        self.notes: list[str] = []  # more about the late
        self.pids: dict[Any, int] = {}  # of the late, as far as they are known
        self.stopped: list[Any] = []  # of the late, those whose process is stopped
        self.absent: list[Any] = []  # of the late, those that are not attached
        self._wording = wording

    def add_late(self, workers: Mapping[Any, Peer | None]) -> None:
        """These workers are late: the error has their pids, where known, and says which are stopped."""
        self.late += sorted(workers)
        known = {name: peer for name, peer in workers.items() if peer is not None}
        self.pids |= {name: peer.pid for name, peer in known.items()}
        self.stopped += sorted(name for name, peer in known.items() if peer.stopped)

    def check(self, what: str, version: int | None) -> None:
        """Raise what went wrong, if anything did: a worker's own exception first, then deaths, then the late."""
        if self.failed:
            self._raise_failure(what)
        if self.dead:
            words, late = self._wording, "".join(f"; {each}" for each in self.about_late())
            raise WorkerDied(
                f"{what} {words.sent}, but {_with_cause(self.dead)} {words.died} before {words.doing}{late}. "
                f"{words.after_death}",
                version=version,
                missing=[*self.dead, *self.late],
            )
        if self.late:
            raise self.lateness(what, version)

    def lateness(self, what: str, version: int | None) -> AckTimeout:
        """The error that names the late."""
        words = self._wording
        more = [*self.about_late()[1:], *self.about_dead()]
        advice = ""
        if set(self.stopped) != set(self.late):  # else more time helps nobody
            more.append(words.late_hint)
            advice = f". {words.after_lateness}"
        return AckTimeout(
            f"{what} {words.sent}, but {self._named(self.late)} did not {words.do} in time; {'; '.join(more)}{advice}",
            version=version,
            missing=[*self.late, *self.dead],
        )

    def about_dead(self) -> list[str]:
        """A sentence about the dead, if there are any."""
        return [f"dead: {_with_cause(self.dead)}"] if self.dead else []

    def about_late(self) -> list[str]:
        """Sentences about the late, if there are any."""
        if not self.late:
            return []
        found = [f"late: {self._named(self.late)}", *self.notes]
        if self.stopped:
            pids = " ".join(str(self.pids[name]) for name in self.stopped if name in self.pids)
            cure = f"`kill -CONT {pids}` lets {'it' if len(self.stopped) == 1 else 'them'} go on"
            found.append(f"stopped: {self._named(self.stopped)}, {cure}{self._wording.after_stop}")
        if self.absent:
            found.append(f"{listed(self.absent)} {'is' if len(self.absent) == 1 else 'are'} not attached")
        return found

    def _named(self, names: Sequence[Any]) -> str:
        pids = {name: f" (pid {pid})" for name, pid in self.pids.items() if isinstance(name, int)}
        return ", ".join(listed([name]) + pids.get(name, "") for name in names)

    def _raise_failure(self, what: str) -> None:
        worker, failure = next(iter(self.failed.items()))
        if isinstance(failure, str):
            raise RuntimeError(f"{listed([worker])} was sent {what}, but {failure}")
        texts = [
            f"{listed([index])} failed while it applied {what}:\n{each.trace}"
            for index, each in self.failed.items()
            if isinstance(each, Failure)
        ]
        texts += self.about_dead() + self.about_late()
        raise failure.exception() from RemoteTraceback("\n".join(texts))


def listed(names: Sequence[Any]) -> str:
    """Names for a sentence: an int is a worker's index, a string stands for itself."""
    return ", ".join(f"worker {name}" if isinstance(name, int) else name for name in names)


def _with_cause(dead: Mapping[Any, str]) -> str:
    return ", ".join(f"{listed([name])} ({how})" if how else listed([name]) for name, how in dead.items())
