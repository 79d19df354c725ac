"""A send to workers beyond this machine: one request to each worker, and one wait for all answers.

RemoteSender packs the weights once and gives each worker's transport what its engine sends (start()). The request that
comes back says when the worker has applied them, or what is known of a failure. Exchange.finish() waits for all
requests with the send's deadline, and its Outcome names who is dead, late or failed.

INV: a worker has at most one request under way. One that still owes an answer to an earlier send is waited for within
the deadline, then named late, and gets nothing new. So its late answer counts for nothing but itself.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from ...engine.deadlines import SLICE, deadline_after, timeout_or_default, timeout_or_none
from ...engine.outcome import Failure, Outcome, Wording
from ...engine.source.dtypes import Dtypes
from ...engine.subscriber import Consistency
from ..api import WeightSyncScheme
from ..context import Arguments
from ..receiver import WeightReceiver
from ..sender import Posted, WeightSender
from ..strategy import Form
from .packed_weights import PackedWeights, Packer, allow_views, label_of

DEFAULT_TIMEOUT = 60.0  # seconds
WORDING = Wording("its process may be starting, stopped, or busy with a call that came before")
_NONE: Any = object()


class Dead(Exception):
    """The process that a request went to is gone. `final`: for good, so later sends leave it out."""

    def __init__(self, how: str, *, final: bool = True) -> None:
        super().__init__(how)
        self.final = final


class Failed(Exception):
    """The worker raised, or answered something else."""

    def __init__(self, failure: Failure | str) -> None:
        super().__init__(failure)
        self.failure = failure


class Request(ABC):
    """A message to one worker, under way."""

    @abstractmethod
    def done(self) -> bool:
        """Has the worker answered, or is it known to be dead? Never waits."""

    @abstractmethod
    def result(self) -> Any:
        """The answer, once it is done. Raises Dead, Failed."""


class RemoteTransport(ABC):
    """Reaches one worker. Each engine has its own.

    Args:
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits without limit, None is 60.

    Attributes:
        request: the one that its worker has not answered, as far as was looked.
        reported: WorkerDied has named it, so that sends leave it out.
        node: where the worker runs, once it is known; only for fan_out="node".
    """

    request: Request | None = None
    reported = False
    node: str | None = None

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout_or_default(timeout, DEFAULT_TIMEOUT)
        self._packer = Packer()
        self._sent = 0
        self._pending: Exchange | None = None

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Is there a worker to send to? Otherwise every call does nothing."""

    def wrap(self, packed: PackedWeights) -> Any:
        """What start() takes; made once for all workers of a send."""
        return packed

    @abstractmethod
    def start(self, content: Any) -> Request:
        """Send what wrap() gave, or News (nodes.py). Answered when the worker has applied it. Raises Dead, Failed."""

    @staticmethod
    @abstractmethod
    def wait(requests: Sequence[Any], seconds: float, *, first: bool) -> None:
        """Until all of these requests, or with `first` one of them, are done; at most so many seconds."""

    def send_weights(self, model_id: Any = _NONE, weights: Any = _NONE, *, timeout: float | None = None) -> None:
        """Send a TensorDict or a dict, and wait until the worker has applied it.

        Args:
            model_id: of the weights. Weights alone, in its place, are those of "policy".
            weights: the weights.
            timeout: seconds for the whole call; None is the transport's.

        Raises WorkerDied, AckTimeout, the worker's own exception, RuntimeError for an answer that is none.
        """
        self.send_weights_async(model_id, weights)
        self.wait_ack(timeout=timeout)

    def send_weights_async(self, model_id: Any = _NONE, weights: Any = _NONE) -> None:
        """Send, and return at once; a worker that owes an answer gets them in wait_ack(), when it has answered."""
        if model_id is _NONE or weights is _NONE:
            model_id, weights = "policy", weights if model_id is _NONE else model_id
        if not isinstance(model_id, str) or weights is _NONE:
            raise TypeError("send_weights() takes a model id and weights, or weights alone; nothing was sent")
        version = self._sent + 1
        if not self.connected:
            self._pending = Exchange(version, {}, lambda _: None).begin()
            return
        content = self.wrap(self._packer.pack(weights, model_id, version))
        self._sent = version
        self._pending = Exchange(version, {0: self}, lambda _: one_step(self, content)).begin()

    def wait_ack(self, *, timeout: float | None = None) -> None:
        """Wait for the last send_weights_async(). Raises RuntimeError when there was none, and as send_weights().

        Args:
            timeout: seconds; None is the transport's.
        """
        deadline = deadline_after(timeout, self.timeout)
        if self._pending is None:
            raise RuntimeError("no send is pending; call send_weights_async() first")
        exchange, self._pending = self._pending, None
        exchange.finish(deadline)
        exchange.outcome.check("the weights", None)

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """None: the worker gets weights as an argument of a call."""
        timeout_or_none(timeout)
        return None

    def send_ack(self, message: str = "updated") -> None:  # noqa: B027
        """Does nothing: the call's return is the answer."""

    def check_ack(self, message: str = "updated", *, timeout: float | None = None) -> None:
        """As wait_ack(), for the answer "updated"; RuntimeError for another word, which no worker here answers."""
        if message != "updated":
            raise RuntimeError(f"this transport's workers answer 'updated' by returning, and never {message!r}")
        self.wait_ack(timeout=timeout)

    @abstractmethod
    def check_connection(self) -> bool:
        """Can this process send?"""


Steps = Generator["Request | None", Any, None]  # yields requests, gets answers; None: it waits for another worker


def one_step(transport: RemoteTransport, content: Any) -> Steps:
    """The one request of a worker that gets the weights themselves."""
    yield transport.start(content)


class Exchange(Posted):
    """A send under way: what each worker gets, and the only wait for the answers.

    Args:
        version: of the weights.
        transports: by worker.
        steps: gives the requests of a worker, one after the other; each gets the answer to the last.

    Attributes:
        open: the workers of which more is to come.
        mine: the newest request of each worker in this send.
    """

    def __init__(self, version: int, transports: Mapping[int, RemoteTransport], steps: Callable[[int], Any]) -> None:
        super().__init__(version, transports, outcome=Outcome(WORDING))
        self.open: dict[int, RemoteTransport] = dict(transports)
        self._steps = {index: steps(index) for index in transports}
        self.mine: dict[int, Request] = {}

    def begin(self) -> Exchange:
        """Start what can be started without waiting. Returns the exchange."""
        self._advance_all()
        return self

    def finish(self, deadline: float) -> None:
        """Wait for the answers, until the monotonic time `deadline`, and sort the workers into the outcome."""
        while self.open:
            now = time.monotonic()
            requests = [each.request for each in self.open.values() if each.request is not None]
            (transport, *_) = self.open.values()
            transport.wait(requests, max(0.0, min(deadline - now, SLICE)), first=len(requests) < len(self.open))
            self._advance_all()
            if now >= deadline:
                break
        outcome = self.outcome
        outcome.add_late(dict.fromkeys(self.open))
        outcome.dead = dict(sorted(outcome.dead.items()))
        outcome.failed = dict(sorted(outcome.failed.items()))

    def _advance_all(self) -> None:
        count = -1
        while count != len(self.open):  # where one worker is done, another may begin
            count = len(self.open)
            for index in list(self.open):
                self._advance(index, self.open[index])

    def _advance(self, index: int, transport: RemoteTransport) -> None:
        """Take in the answer of this worker, if it is there, and start what comes next."""
        answer = None
        try:
            if transport.request is not None:
                if not transport.request.done():
                    return
                request, transport.request = transport.request, None
                try:
                    answer = request.result()
                except Failed:
                    if request is self.mine.get(index):
                        raise
                if request is not self.mine.get(index):  # of an earlier send: this one has not begun
                    answer = None
            begun = self._steps[index].send(answer)
            if begun is not None:
                transport.request = self.mine[index] = begun
            return
        except StopIteration:
            self.outcome.done.append(index)
        except Dead as dead:
            self.outcome.dead[index] = str(dead)
            transport.node = None  # it may start again elsewhere
            transport.reported = dead.final
        except Failed as failed:
            self.outcome.failed[index] = failed.failure
        del self.open[index]


class RemoteScheme(WeightSyncScheme):
    """What the schemes beyond one machine have in common.

    Args:
        strategy: the form in which weights travel, "state_dict" or "tensordict".
        fan_out: None: each worker gets its own copy of the weights, and copies them into its model. "node": one copy
            goes to each node, where one worker publishes it into an arena, to which all of the node's workers attach.
        slots: of those arenas; see Publisher.
        consistency: of their subscribers; see Subscriber.
        timeout: default of every call, in seconds; math.inf waits without limit, None is 60.
        partial: see WeightSyncScheme. With fan_out="node" the first send to a node has all leaves.
        dtype: see WeightSyncScheme.
    """

    def __init__(
        self,
        strategy: Form = "state_dict",
        *,
        fan_out: Literal["node"] | None = None,
        slots: int = 1,
        consistency: Consistency = "pinned",
        timeout: float | None = DEFAULT_TIMEOUT,
        partial: bool = False,
        dtype: Dtypes = None,
    ) -> None:
        super().__init__(strategy, partial=partial, dtype=dtype)
        if fan_out not in (None, "node"):
            raise ValueError(f'fan_out is None or "node", not {fan_out!r}')
        self.fan_out = fan_out
        self.slots = slots
        self.consistency: Consistency = consistency
        self.timeout = timeout_or_default(timeout, DEFAULT_TIMEOUT)

    @abstractmethod
    def create_transport(self, pipe_or_context: Any) -> RemoteTransport:
        """The transport to one worker, given as workers() gives it."""

    @abstractmethod
    def workers(self, arguments: Arguments) -> Sequence[Any]:
        """What create_transport() takes for each worker, from what init_on_sender() got. Raises ValueError."""

    def make_fan_out(self, packer: Packer) -> Any:
        """What sends with fan_out="node": a NodeFanOut (nodes.py), where the engine can find out its workers' nodes."""
        raise ValueError(f'{type(self).__name__} has no fan_out="node"; each of its workers gets its own copy')

    @override
    def create_sender(self) -> RemoteSender:
        return RemoteSender(self)

    @override
    def create_receiver(self) -> RemoteReceiver:
        return RemoteReceiver(self)

    @override
    def shutdown(self) -> None:
        super().shutdown()
        for end in (self._sender, self._receiver):
            if isinstance(end, (RemoteSender, RemoteReceiver)):
                end.close()


class RemoteSender(WeightSender):
    """Sends to all workers at once, and waits for all of them with one deadline."""

    _scheme: RemoteScheme
    _transports: dict[int, RemoteTransport]

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self._packer = Packer()
        self._nodes: Any = self._scheme.make_fan_out(self._packer) if self._scheme.fan_out == "node" else None

    @property
    def default_timeout(self) -> float:  # type: ignore[override]
        """Of a call without timeout=, in seconds: the scheme's."""
        return self._scheme.timeout

    @override
    def _find_workers(self, arguments: Arguments) -> None:
        workers = self._scheme.workers(arguments)
        arguments.check_count(workers, "workers", "num_workers", "num_collectors")
        for index, worker in enumerate(workers):
            self.register_worker(index, worker)

    @override
    def _post(self, source: Any, workers: list[int], deadline: float) -> Posted:
        living = self._living(workers)
        connected = {index: transport for index, transport in living.items() if transport.connected}
        version = self._version = self._version + 1  # now: a node may have it although this raises
        if self._nodes is not None:
            exchange: Exchange = self._nodes.post(
                source, self._model_id, version, connected, self._transports, deadline
            )
        else:
            packed = self._packer.pack(source, self._model_id, version)
            content = next(iter(connected.values())).wrap(packed) if connected else None
            exchange = Exchange(version, connected, lambda index: one_step(connected[index], content)).begin()
        return exchange

    @override
    def _gather(self, posted: Posted, deadline: float) -> None:
        assert isinstance(posted, Exchange)
        posted.finish(deadline)
        posted.outcome.check(f"version {posted.version} of {self._model_id!r}", posted.version)

    def close(self) -> None:
        """End the arena of this node, if there is one. Idempotent."""
        if self._nodes is not None:
            self._nodes.close()


class RemoteReceiver(WeightReceiver):
    """Applies what a call brought: weights, which it copies, or News of this node's arena, to which it binds the model.

    Thread-safe: calls may come on any thread.
    """

    _scheme: RemoteScheme

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self._applying = threading.Lock()
        self._news = threading.Event()
        self._arena: Any = None  # a nodes.Attached

    @override
    def _connect(self, arguments: Arguments) -> None:
        allow_views(self, self._model_id)  # apply_weights() copies them

    @property
    @override
    def version(self) -> int:
        """The version that the model uses now; 0: as it came. With fan_out="node" each forward uses the newest."""
        return self._version if self._arena is None else self._arena.version

    @override
    def apply_weights(self, weights: Any) -> None:
        """Make the model use weights that came from a sender; returns when it does.

        With fan_out="node" the model is bound to shared memory, and nothing is copied. Else the weights are copied in
        place, so no forward may run meanwhile.

        Raises ValueError for weights of another model, ManifestMismatch for weights that do not fit and for plain
        weights after the model was bound; the errors of Subscriber.
        """
        self._scheme.check_open("apply_weights")
        weights = self._own(weights)
        label = label_of(weights)
        if label is not None:
            self._own((label.model_id, None))  # raises for another model
        with self._applying:
            model = self._resolve_model_ref()
            if hasattr(weights, "attach"):  # nodes.News
                self._arena = weights.attach(self._arena, model, self)
            else:
                self._strategy.apply_weights(model, weights)
            self._version = self._version + 1 if label is None else label.version
        self._news.set()

    @override
    def receive(self, timeout: float | None = 0.001) -> bool:
        """Has a call brought weights since this was last asked? They are applied already.

        Args:
            timeout: seconds to wait for the next ones; 0 only looks, None is the scheme's.
        """
        self._scheme.check_open("receive")
        seconds = self._scheme.timeout if timeout_or_none(timeout) is None else timeout
        came = self._news.wait(min(seconds or 0.0, threading.TIMEOUT_MAX))
        if came:
            self._news.clear()
        return came

    @override
    def close(self) -> None:
        """Leave the arena; a bound model raises ClosedError when it is called from now on."""
        with self._applying:
            if self._arena is not None:
                self._arena.close()
