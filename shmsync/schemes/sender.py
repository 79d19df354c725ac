"""The sender brings the weights of one model to its workers, over any transport. Schemes derive theirs from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from typing_extensions import override

from ..engine.deadlines import check_worker, deadline_after
from ..engine.outcome import Outcome, Wording
from ..errors import ProtocolError
from .context_args import Arguments, chosen_workers, model_at, process_of
from .link.send_lock import SendLock, hold_all
from .scheme_end import SchemeEnd

_TRANSPORT_WORDING = Wording("its transport timed out", after_lateness="Send again, or give its transport more time")


class TransportCalls:
    """One send over transports of a user's own: they are called directly, one after the other."""

    def __init__(self, transports: Mapping[int, Any], what: str, version: int) -> None:
        self._transports = dict(transports)  # the workers without an error so far
        self._what, self._version = what, version
        self._outcome = Outcome(_TRANSPORT_WORDING)
        self._errors: dict[int, Exception] = {}

    def send(self, model_id: str, weights: Any) -> None:
        """Call send_weights_async(), or send_weights() of transports without it."""
        for index, transport in list(self._transports.items()):
            send = getattr(transport, "send_weights_async", transport.send_weights)
            self._call(index, partial(send, model_id, weights))

    def finish(self) -> None:
        """Call wait_ack() of transports in two steps. Raises a transport's error, or AckTimeout with the late."""
        for index, transport in list(self._transports.items()):
            if hasattr(transport, "send_weights_async") and hasattr(transport, "wait_ack"):
                self._call(index, transport.wait_ack)
        for index, error in sorted(self._errors.items()):
            notes = [*getattr(error, "__notes__", ()), f"raised by the transport of worker {index}"]
            error.__notes__ = notes  # add_note() is not in Python 3.10
            raise error
        self._outcome.check(self._what, self._version)

    def _call(self, index: int, function: Callable[[], Any]) -> None:
        try:
            function()
        except TimeoutError as error:
            self._outcome.late.append(index)
            self._outcome.notes.append(f"worker {index}: {error}" if str(error) else f"worker {index} timed out")
            del self._transports[index]
        except Exception as error:
            self._errors[index] = error
            del self._transports[index]


class WeightSender(SchemeEnd):
    """Sends the weights of one model to its workers, over any transport. Made by a scheme.

    Args:
        scheme: the WeightSyncScheme that makes it.

    One send at a time: a call of another thread waits within its own deadline, and then raises WriterBusy.
    """

    sends = True  # False: its workers keep the weights they came with
    takes_process = False  # can it see the death of a worker's process?
    default_timeout = math.inf  # of a call without timeout=: the transports' own time-outs count

    def __init__(self, scheme: Any) -> None:
        super().__init__(scheme)
        self._model_names: tuple[str, ...] = ()  # under which the context may have it, if not under the id
        self._version = 0

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self.given_model: Any = None  # what init_on_sender(model=) got; None: nothing
        self._processes: dict[int, Any] = {}  # of workers that are being registered
        self._transports: dict[int, Any] = {}
        self._pending: Any = None  # what _post() gave a send_async()
        self._send_locks = SendLock()

    @property
    def _context(self) -> Any:
        return self._living_context

    @property
    def version(self) -> int:
        """Of the newest weights that were sent; 0: none yet."""
        return self._version

    @property
    def worker_ids(self) -> list[int]:
        """The registered workers."""
        return sorted(self._transports)

    def is_dead(self, worker_idx: int) -> bool:
        """Has a WorkerDied named this worker, so that sends leave it out?

        Args:
            worker_idx: the worker's index. Raises ValueError for one that is not registered.
        """
        (index,) = chosen_workers([worker_idx], self.worker_ids)
        return self._is_dead(index)

    def _is_dead(self, index: int) -> bool:
        return False

    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        """Reach this worker over this pipe from now on. It replaces an earlier worker of the same index.

        Args:
            worker_idx: 0 or more.
            pipe_or_context: its pipe, or what else the scheme reaches it by.
            process: over pipes the worker's Process, so that its death is seen at once; else it is known from its first
                answer, and before that only the end of its pipe tells. Other schemes notice deaths by themselves.

        Raises ValueError for another index, TypeError for a process that cannot be watched.
        """
        worker_idx = check_worker(worker_idx)
        if process is not None:
            if not self.takes_process:
                raise TypeError(
                    f"a {type(self).__name__} cannot watch process={process!r}; leave it out for worker {worker_idx}"
                )
            self._processes[worker_idx] = process
        try:
            self._register_worker(worker_idx, pipe_or_context)
        finally:
            self._processes.pop(worker_idx, None)

    # Hooks: a subclass may override these, in every scheme.

    @override
    def _set_context(self, context: Any, model_id: str | None = None) -> None:
        """Look for the model here when send() gets none. Held weakly."""
        super()._set_context(context)
        if model_id is not None:
            self._model_id = model_id

    def _register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Reach this worker from now on."""
        self._transports[worker_idx] = self._scheme.create_transport(pipe_or_context)

    def _iterate_transports(self, worker_ids: int | Sequence[int] | None = None) -> Iterator[Any]:
        """The transports of these workers. A send goes to the workers whose transports this yields."""
        for index in chosen_workers(worker_ids, self.worker_ids):
            yield self._transport_of(index)

    def _transport_of(self, index: int) -> Any:
        return self._transports[index]

    def _reached(self, workers: list[int]) -> list[int]:
        """Those of these workers whose transports _iterate_transports() yields."""
        if not self._picks:
            return workers
        own = {id(self._transport_of(index)): index for index in workers}
        reached = []
        for transport in self._iterate_transports(workers):
            if id(transport) not in own:
                raise ValueError(
                    f"_iterate_transports() yields {transport!r}, which is the transport of none of the workers "
                    f"{workers}; yield what super()._iterate_transports() gives"
                )
            reached.append(own[id(transport)])
        return sorted(reached)

    @property
    def _picks(self) -> bool:
        """Does a subclass choose the workers of a send?"""
        return type(self)._iterate_transports is not WeightSender._iterate_transports

    def begin(self, arguments: Arguments) -> None:
        """Take in the arguments that init_on_sender() got. Called by the scheme."""
        self._set_context(arguments.context, arguments.model_id)
        self.set_up(arguments)

    def set_up(self, arguments: Arguments) -> None:
        """Take in the model and the workers from these arguments."""
        self._take_model(arguments, "model")
        pipes: Sequence[Any] | None = arguments.get("pipes")
        count = arguments.count("num_workers")
        if pipes is not None:
            if count is not None and count != len(pipes):
                raise ValueError(
                    f"num_workers is {count} but there are {len(pipes)} pipes; give one pipe for each worker"
                )
            for index, pipe in enumerate(pipes):
                self.register_worker(index, pipe, process_of(arguments, index) if self.takes_process else None)

    def _take_model(self, arguments: Arguments, *names: str) -> None:
        """The model that was given under the first of these names; else what the context has there."""
        self.given_model = next((m for name in names if (m := arguments.given(name)) is not None), None)
        self._model_names = names

    @property
    def context_model(self) -> Any:
        """The model that the context has under another name than its id; None when it has none."""
        context = self._context
        return next((m for name in self._model_names if (m := model_at(context, name)) is not None), None)

    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> int:
        """Send weights, and wait until every worker has applied them.

        Args:
            weights: a module, a TensorDict, a dict, a model id, or None for the context's model.
            worker_ids: None sends to all workers, an int to one, a list to several.
            timeout: seconds for the whole call; None is the scheme's default. Transports of a user's own are called
                directly, so their own time-outs count.

        Returns:
            The version that the weights have now: it grows with every send.

        Raises:
            WriterBusy: another thread was sending until the deadline, or this one is inside a send; nothing was sent.
            RuntimeError: a send_async() is pending.
            ValueError: a worker that is not registered, or no weights.
            ProtocolError: this sender was unpickled and has no workers.
            ManifestMismatch: the weights do not fit; no worker was changed.
            WorkerDied: sent, but these workers died before they had applied it; the others have. The sender stays
                usable, and the dead are left out from now on.
            AckTimeout: sent, but these workers have not applied it in time.
            Exception: that of a worker, with its traceback as the cause.
        """
        deadline = self._deadline(timeout)
        with hold_all(self.send_locks(), deadline, "send"):
            self.check_ready("send")
            posted = self._post(weights, self._chosen(worker_ids), deadline)
            self._collect(posted, deadline)
            return self.version

    def send_async(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> int:
        """Send weights and return at once; wait_async() waits. Raises as send() does, but for what workers do.

        Args:
            weights: as in send(), and so are worker_ids and timeout.
            worker_ids: see send().
            timeout: see send().
        """
        deadline = self._deadline(timeout)
        with hold_all(self.send_locks(), deadline, "send_async"):
            self.check_ready("send_async")
            self._pending = self._post(weights, self._chosen(worker_ids), deadline)
            return self.version

    def wait_async(self, *, timeout: float | None = None) -> int:
        """Wait for the pending send_async(), and return its version; `timeout` as in send().

        Raises RuntimeError when none is pending, and what send() raises; then nothing is pending any more.
        """
        deadline = self._deadline(timeout)
        with hold_all(self.send_locks(), deadline, "wait_async"):
            if self._pending is None:
                raise RuntimeError("no send is pending; call send_async() first")
            posted, self._pending = self._pending, None
            self._collect(posted, deadline)
            return self.version

    def update_weights(self, weights: Any) -> int:
        """Call send(weights)."""
        return self.send(weights)

    # What the kinds of senders do differently.

    def _post(self, weights: Any, workers: list[int], deadline: float) -> Any:
        """Start sending; what _collect() needs."""
        prepared = self.sent_weights(weights)
        self._version += 1
        names = {id(transport): index for index, transport in self._transports.items()}
        transports = {  # one that no index has goes by its position
            names.get(id(transport), position): transport
            for position, transport in enumerate(self._iterate_transports(workers))
        }
        calls = TransportCalls(transports, f"version {self._version} of {self._model_id!r}", self._version)
        calls.send(self._model_id, prepared)
        return calls

    def _collect(self, posted: Any, deadline: float) -> None:
        """Wait for every answer."""
        if posted:  # of a sender that sends nothing it is empty
            posted.finish()

    def _deadline(self, timeout: float | None) -> float:
        return deadline_after(timeout, self.default_timeout)

    def send_locks(self) -> list[SendLock]:
        """What a send has to itself while it lasts."""
        return [self._send_locks]

    def check_ready(self, call: str) -> None:
        """Raise RuntimeError if a send_async() is pending, ProtocolError if this is a copy without workers."""
        self._scheme.check_open(call)
        if self._pending is not None:
            raise RuntimeError(f"{call}() while a send_async() is pending; call wait_async() first")
        if self._copied and self.sends and not self.worker_ids:
            raise ProtocolError(
                f"{call}() of a sender that was copied or unpickled: pipes and workers stayed with the original, so it "
                "has no workers; call register_worker() for each first"
            )

    def _source(self, weights: Any) -> Any:
        """What the user means: a module or weights."""
        if weights is None and self.given_model is not None:
            return self.given_model
        found = self._scheme.find_source(weights, self._model_id, self._context)
        found = self.context_model if found is None else found
        return self._needed_source(found)

    def _needed_source(self, found: Any) -> Any:
        if found is None:
            raise ValueError(
                f"there are no weights to send: pass them, or give init_on_sender() a context or a model= for "
                f"{self._model_id!r}"
            )
        return found

    def sent_weights(self, weights: Any) -> Any:
        """What travels for the weights that a user passed."""
        if self._scheme.prepares:
            prepared = self._scheme.prepare_weights(weights, self._model_id, self._strategy, self._context)
            found = self._needed_source(prepared)
        else:
            found = self._source(weights)
        if isinstance(found, nn.Module):
            return self._strategy.extract_weights(found)
        return self._strategy.cast(found)

    def _chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        return chosen_workers(worker_ids, self.worker_ids)
