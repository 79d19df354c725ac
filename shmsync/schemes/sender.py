"""The sender brings the weights of one model to its workers.

A send goes through these methods, in this order:

    _source()   what the user means: a module or weights
    _post()     write it (into the arena, or into a message), and hand each worker its message
    _gather()   wait for all answers at once, and raise what went wrong

WeightSender sends over transports that users wrote. PipeSender reaches workers over pipes (links.py); where it writes
the weights is a matter of its two kinds, in shared_memory.py and multiprocess.py. remote/base.py has the third kind.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from ..engine.deadlines import check_worker, deadline_after
from ..engine.outcome import Outcome, Wording
from ..errors import ProtocolError, WorkerDied, WriterBusy
from .context import Arguments, chosen_workers, find_source
from .links import Link, gather
from .messages import UPDATED, Tag

_WORDING = Wording("its transport timed out", after_lateness="Send again, or give its transport more time")


@dataclass
class Posted:
    """A send under way. `workers`: what each worker is waited for by; over pipes `tags`: which answer, in what word."""

    version: int
    workers: Mapping[int, Any]
    tags: Mapping[int, Tag] = field(default_factory=dict)
    word: str = UPDATED
    outcome: Outcome = field(default_factory=lambda: Outcome(_WORDING))
    errors: dict[int, Exception] = field(default_factory=dict)  # of transports of a user's own


class SendLock:
    """Held around each call of a sender: `with lock.hold("send", deadline):`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0  # the thread that has it

    def hold(self, call: str, deadline: float) -> SendLock:
        """Take it. Raises WriterBusy when this thread has it already, or another one until the deadline."""
        if self._holder == threading.get_ident():
            raise WriterBusy(f"{call}() inside a send or an update() of this thread; call it after that")
        if not self._lock.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
            raise WriterBusy(f"{call}(): another thread's send lasted until the deadline; nothing was done, try again")
        self._holder = threading.get_ident()
        return self

    def __enter__(self) -> None:
        """It is held already."""

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give it back."""
        self._holder = 0
        self._lock.release()


class WeightSender:
    """Sends the weights of one model to its workers, over any transport. Made by a scheme.

    Args:
        scheme: the WeightSyncScheme that makes it.

    One send at a time: a call of another thread waits within its own deadline, and then raises WriterBusy. A pickled
    sender keeps its configuration, without context and workers.
    """

    default_timeout = math.inf  # of a call without timeout=: the transports' own time-outs count
    _unpickled = False

    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme
        self._strategy = scheme.make_strategy()
        self._model_id = "policy"
        self._version = 0
        self._start_here()

    def _start_here(self) -> None:
        """Set what belongs to this process; a copy begins without it."""
        self._context_ref: weakref.ref[Any] | None = None
        self._model: Any = None  # what init_on_sender(model=) got
        self._cached: Any = None  # what init_on_sender(cached_weights=) got
        self._links: dict[int, Any] = {}  # what reaches each worker
        self._posted: Posted | None = None  # of a send_async()
        self._lock = SendLock()

    @property
    def model_id(self) -> str:
        """Which model it sends."""
        return self._model_id

    @property
    def version(self) -> int:
        """Of the newest weights that were sent; 0: none yet."""
        return self._version

    @property
    def worker_ids(self) -> list[int]:
        """The registered workers."""
        return sorted(self._links)

    @property
    def _context(self) -> Any:
        return None if self._context_ref is None else self._context_ref()

    @property
    def _pending_async(self) -> bool:
        """Is a send_async() not waited for yet?"""
        return self._posted is not None

    def is_dead(self, worker_idx: int) -> bool:
        """Has a WorkerDied named this worker, so that sends leave it out? ValueError for one that is not registered."""
        (index,) = chosen_workers([worker_idx], self.worker_ids)
        return bool(getattr(self._links[index], "reported", False))

    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        """Reach this worker over this pipe from now on. It replaces an earlier worker of the same index.

        Args:
            worker_idx: 0 or more.
            pipe_or_context: its pipe, or what else the scheme reaches it by.
            process: over pipes the worker's process (a Process, a Popen or a pid), so that its death is seen at once;
                else it is known from its first answer, and before that only the end of its pipe tells. Other schemes
                notice deaths by themselves.

        Raises ValueError for another index, TypeError for another process.
        """
        self._links[check_worker(worker_idx)] = self._scheme.create_transport(pipe_or_context)

    def _set_context(self, context: Any, model_id: str) -> None:
        """Look for the model here when send() gets none. Held weakly."""
        self._context_ref = None if context is None else weakref.ref(context)
        self._model_id = model_id

    def set_up(self, arguments: Arguments) -> None:
        """Take in the model and the workers. Called by init_on_sender()."""
        self._set_context(arguments.context, arguments.model_id)
        self._model = arguments.given("model")
        if self._model is None:
            self._model = arguments.given("source_model")
        self._cached = arguments.given("cached_weights")
        self._find_workers(arguments)

    def _find_workers(self, arguments: Arguments) -> None:
        """Register the workers that init_on_sender() was given."""
        pipes: Sequence[Any] | None = arguments.get("pipes")
        arguments.check_count(pipes, "pipes", "num_workers")
        procs = arguments.get("procs") or ()
        for index, pipe in enumerate(pipes or ()):
            self.register_worker(index, pipe, procs[index] if index < len(procs) else None)

    # ---- a send

    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> int:
        """Send weights, and wait until every worker has applied them.

        Args:
            weights: a module, a TensorDict, a dict, a model id, or None for the context's.
            worker_ids: None sends to all workers, an int to one, a list to several.
            timeout: seconds for the whole call; None is the scheme's default. Transports of a user's own are called
                directly, so their own time-outs count.

        Returns:
            The version that the weights have now: it grows with every send.

        Raises:
            WriterBusy: another thread was sending until the deadline; nothing was sent.
            RuntimeError: a send_async() is pending.
            ValueError: a worker that is not registered, or no weights.
            ProtocolError: this sender was unpickled and has no workers.
            ManifestMismatch: the weights do not fit; no worker was changed.
            WorkerDied: sent, but these workers died before they had applied it; the others have. The sender stays
                usable, and the dead are left out from now on.
            AckTimeout: sent, but these workers have not applied it in time.
            Exception: that of a worker, with its traceback as the cause.
        """
        deadline = deadline_after(timeout, self.default_timeout)
        with self._one_at_a_time("send", deadline):
            posted = self._post(self._source(weights), self._chosen(worker_ids), deadline)
            self._gather(posted, deadline)
            return posted.version

    def send_async(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> int:
        """As send(), but returns at once; wait_async() waits, and raises what workers do."""
        deadline = deadline_after(timeout, self.default_timeout)
        with self._one_at_a_time("send_async", deadline):
            self._posted = self._post(self._source(weights), self._chosen(worker_ids), deadline)
            return self._posted.version

    def wait_async(self, *, timeout: float | None = None) -> int:
        """Wait for the pending send_async(), and return its version; `timeout` as in send().

        Raises RuntimeError when none is pending, and what send() raises; then nothing is pending any more.
        """
        deadline = deadline_after(timeout, self.default_timeout)
        with self._one_at_a_time("wait_async", deadline):
            assert self._posted is not None
            posted, self._posted = self._posted, None
            self._gather(posted, deadline)
            return posted.version

    def connect(self, weights: Any) -> None:
        """Send the first weights, if any are known; see WeightSyncScheme.connect()."""
        if weights is not None or self._scheme._prepares or self.find_source(None) is not None:
            self.send(weights)

    def update_weights(self, weights: Any) -> int:
        """Call send(weights)."""
        return self.send(weights)

    def _one_at_a_time(self, call: str, deadline: float) -> SendLock:
        """The lock, held, for a `with`. Raises ClosedError after shutdown(), RuntimeError for a call out of turn."""
        lock = self._lock.hold(call, deadline)
        try:
            self._scheme.check_open(call)
            if call == "wait_async":
                if self._posted is None:
                    raise RuntimeError("no send is pending; call send_async() first")
            elif self._posted is not None:
                raise RuntimeError(f"{call}() while a send_async() is pending; call wait_async() first")
        except BaseException:
            lock.release()
            raise
        return lock

    def _source(self, weights: Any) -> Any:
        """What the user means: a module or weights."""
        found = self._scheme.prepare_weights(weights, self._model_id, self._strategy, self._context)
        if found is None:
            raise ValueError(
                f"there are no weights to send: pass them, or give init_on_sender() a context or a model= for "
                f"{self._model_id!r}"
            )
        return found

    def find_source(self, weights: Any) -> Any:
        """What send(weights) is about, not extracted; None: nothing is known."""
        return find_source(weights, self._model_id, self._context, self._cached, self._model)

    def _chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        return chosen_workers(worker_ids, self.worker_ids)

    def _living(self, workers: list[int]) -> dict[int, Any]:
        """What reaches those of these workers that no error has named as dead. Raises WorkerDied when there is none."""
        if not self._links and self._unpickled:
            raise ProtocolError(
                "this sender was unpickled: pipes and workers stayed with the original, so it has no workers; call "
                "register_worker() for each first"
            )
        living = {index: self._links[index] for index in workers if not self._links[index].reported}
        if workers and not living:
            raise WorkerDied(
                f"all workers that {self._model_id!r} should go to are dead ({', '.join(map(str, workers))}); nothing "
                "was sent. Start others in their place, and call register_worker()",
                missing=workers,
            )
        return living

    def _post(self, source: Any, workers: list[int], deadline: float) -> Posted:
        """Write the weights, and hand each worker its message; what _gather() needs."""
        self._version += 1
        posted = Posted(self._version, {index: self._links[index] for index in workers})
        for index, transport in posted.workers.items():
            send = getattr(transport, "send_weights_async", transport.send_weights)
            _call(posted, index, send, self._model_id, source)
        return posted

    def _gather(self, posted: Posted, deadline: float) -> None:
        """Wait for every answer, and raise what went wrong."""
        for index, transport in posted.workers.items():
            bad = index in posted.outcome.late or index in posted.errors
            if not bad and hasattr(transport, "send_weights_async") and hasattr(transport, "wait_ack"):
                _call(posted, index, transport.wait_ack)
        for index, error in sorted(posted.errors.items()):
            others = [f"that of worker {i} raised {e!r}" for i, e in sorted(posted.errors.items()) if i != index]
            notes = [f"raised by the transport of worker {index}", *others, *posted.outcome.about_late()]
            error.__notes__ = [*getattr(error, "__notes__", ()), *notes]  # add_note() is not in Python 3.10
            raise error
        posted.outcome.check(f"version {posted.version} of {self._model_id!r}", posted.version)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("_scheme", "_strategy", "_model_id", "_version")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._unpickled = True
        self._start_here()


def _call(posted: Posted, index: int, function: Any, *args: Any) -> None:
    """Call a transport of a user's own; what it raises is for the end of the send."""
    try:
        function(*args)
    except TimeoutError as error:
        posted.outcome.late.append(index)
        posted.outcome.notes.append(f"worker {index}: {error}" if str(error) else f"worker {index} timed out")
    except Exception as error:
        posted.errors[index] = error


class PipeSender(WeightSender):
    """Sends one model to workers at the other ends of pipes: a message to each, then one wait."""

    _links: dict[int, Link]  # those of a scheme or of a transport are shared by their senders

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self.default_timeout = self._scheme.timeout
        self._pipes: dict[int, Any] = {}  # kept open as long as the sender: a link does not hold its pipe

    @override
    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        worker_idx = check_worker(worker_idx)
        pipe = getattr(pipe_or_context, "pipe", pipe_or_context)
        self._links[worker_idx] = Link.of(pipe, process)
        self._pipes[worker_idx] = pipe

    def pending(self, worker_idx: int) -> list[Any]:
        """Messages from a worker that are no answers, oldest first; each is given once.

        A wait for answers reads the whole pipe, so a recv() of your own may miss what arrives meanwhile. Raises
        ValueError for a worker that is not registered.
        """
        (index,) = chosen_workers([worker_idx], self.worker_ids)
        return self._links[index].take_pending()

    def resend(self, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None) -> int:
        """Bring workers that joined late to the newest version, with every leaf; nothing new is published.

        Returns that version, 0 if nothing was sent yet. Raises as send() does.
        """
        deadline = deadline_after(timeout, self.default_timeout)
        with self._one_at_a_time("resend", deadline):
            if not self.version:
                return 0
            workers = self._chosen(worker_ids)
            self._gather(self._announce(self._living(workers), again=True), deadline)
            return self.version

    @override
    def _post(self, source: Any, workers: list[int], deadline: float) -> Posted:
        links = self._living(workers)
        self._write(source, links, deadline)
        return self._announce(links)

    def _next_version(self, links: Mapping[int, Link], own: int) -> int:
        """A number that no message over these pipes had, so that a late answer counts for nothing else."""
        return 1 + max([own, *[link.highest.get(self._model_id, 0) for link in links.values()]])

    @abstractmethod
    def _write(self, source: Any, links: Mapping[int, Link], deadline: float) -> None:
        """Make the weights the newest version, for these workers. Raises before anything is changed."""

    @abstractmethod
    def _announce(self, links: Mapping[int, Link], *, again: bool = False) -> Posted:
        """Hand these workers the message of the newest version. `again`: they may have missed earlier ones."""

    @override
    def _gather(self, posted: Posted, deadline: float) -> None:
        outcome = posted.outcome = gather(posted.workers, posted.tags, deadline, posted.word)
        for index in outcome.dead:
            posted.workers[index].reported = True
        for index in outcome.failed:  # it may have missed where its arena is
            posted.workers[index].registered.pop(self._model_id, None)
        outcome.check(f"version {posted.version} of {self._model_id!r}", posted.version)
