"""A send to workers beyond this machine: one request to each worker, and one wait for all answers.

A send goes through these, in this order:

    Packer.pack()         the weights, once, into a flat buffer (packing.py)
    transport.wrap()      what the engine sends of them, made once for all workers
    transport.start()     a request to each worker; the engine's file says how it travels
    Exchange.finish()     the only wait: polls until every request is done, or the deadline; its Outcome raises
    apply_weights()       in the worker: copies the weights into the model

INV: a worker has at most one request under way. One that still owes an answer to an earlier send is waited for within
the deadline, then named late, and gets nothing new. So its late answer counts for nothing but itself.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import nn
from typing_extensions import override

from ...engine.deadlines import deadline_after, timeout_or_default, timeout_or_none
from ...engine.outcome import Failure, Outcome, Wording
from ...engine.source.dtypes import Dtypes
from ...engine.subscriber import Consistency
from ...errors import ManifestMismatch
from ..api import WeightSyncScheme
from ..attachment import Attachment
from ..context import Arguments
from ..receiver import WeightReceiver
from ..sender import Posted, WeightSender
from ..strategy import Form
from .packing import News, PackedWeights, Packer, label_of

DEFAULT_TIMEOUT = 60.0  # seconds
_FASTEST, _SLOWEST = 0.0002, 0.005  # seconds between two looks at what is under way
_WORDING = Wording("its process may be starting, stopped, or busy with a call that came before")


class Dead(Exception):
    """The process that a request went to is gone. `final`: for good, so later sends leave it out."""

    def __init__(self, how: object, *, final: bool = True) -> None:
        super().__init__(" ".join(str(how).split())[:300])
        self.final = final


class Failed(Exception):
    """The worker raised, or answered something else."""

    def __init__(self, failure: Failure | str) -> None:
        super().__init__(failure)
        self.failure = failure


def poll(ready: Callable[[], bool], deadline: float) -> bool:
    """Look until `ready()` is true, less often with time; False at the monotonic time `deadline`."""
    began = time.monotonic()
    while not ready():
        now = time.monotonic()
        if now >= deadline:
            return False
        time.sleep(max(0.0, min(_FASTEST + (now - began) / 20, _SLOWEST, deadline - now)))
    return True


# ---- one worker


class RemoteTransport(ABC):
    """Reaches one worker. Each engine has its own.

    Args:
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits without limit, None is 60.

    Attributes:
        request: what start() gave last, if its worker has not answered that, as far as was looked.
        exchange: the send that it is part of.
        reported: WorkerDied has named the worker, so that sends leave it out.
        node: where the worker runs, once it is known; only for fan_out="node".
    """

    request: Any = None
    exchange: Exchange | None = None
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
    def start(self, content: Any) -> Any:
        """Send what wrap() gave, or News. Returns a request, of which done() says whether there is an answer.

        The worker answers when it has applied the content. Raises Dead.
        """

    @abstractmethod
    def answer(self, request: Any) -> Any:
        """The answer to a request that is done. Raises Dead, Failed."""

    @abstractmethod
    def check_connection(self) -> bool:
        """Can this process send?"""

    def send_weights(self, model_id: Any = "policy", weights: Any = None) -> None:
        """Send a TensorDict or a dict, and wait until the worker has applied it.

        Args:
            model_id: of the weights. Weights alone, in its place, are those of "policy".
            weights: the weights.

        Raises WorkerDied, AckTimeout, the worker's own exception, RuntimeError for an answer that is none.
        """
        self.send_weights_async(model_id, weights)
        self.wait_ack()

    def send_weights_async(self, model_id: Any = "policy", weights: Any = None) -> None:
        """Send, and return at once; a worker that owes an answer gets them in wait_ack(), when it has answered."""
        if not isinstance(model_id, str):
            model_id, weights = "policy", model_id
        self._sent += 1
        workers: dict[int, RemoteTransport] = {0: self} if self.connected else {}
        content = self.wrap(self._packer.pack(weights, model_id, self._sent)) if workers else None
        self._pending = Exchange(self._sent, workers, lambda _: one_step(self, content))

    def wait_ack(self) -> None:
        """Wait for the last send_weights_async(). Raises RuntimeError when there was none, and as send_weights()."""
        if self._pending is None:
            raise RuntimeError("no send is pending; call send_weights_async() first")
        exchange, self._pending = self._pending, None
        exchange.finish(deadline_after(None, self.timeout), "the weights")

    def check_ack(self, message: str = "updated") -> None:
        """As wait_ack(), for the answer "updated"; RuntimeError for another word, which no worker here answers."""
        if message != "updated":
            raise RuntimeError(f"this transport's workers answer 'updated' by returning, and never {message!r}")
        self.wait_ack()

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """None: the worker gets weights as an argument of a call."""
        timeout_or_none(timeout)
        return None

    def send_ack(self, message: str = "updated") -> None:  # noqa: B027
        """Does nothing: the call's return is the answer."""


# ---- all workers of a send


# The requests of a worker, one after the other; gets the answer to each. It yields None to wait for another worker.
Steps = Generator[Any, Any, None]


def one_step(transport: RemoteTransport, content: Any) -> Steps:
    """The one request of a worker that gets the weights themselves."""
    yield transport.start(content)


class Exchange(Posted):
    """A send under way. What needs no waiting is begun at once.

    Args:
        version: of the weights.
        transports: by worker.
        steps: gives those of a worker. They are closed when the worker is dead or has failed.
    """

    def __init__(self, version: int, transports: Mapping[int, RemoteTransport], steps: Callable[[int], Steps]) -> None:
        super().__init__(version, transports, outcome=Outcome(_WORDING))
        self._open = {index: steps(index) for index in transports}
        self._advance_all()

    def finish(self, deadline: float, what: str) -> None:
        """Wait for the answers until the monotonic time `deadline`, and raise what went wrong with `what`."""
        poll(self._advance_all, deadline)
        outcome = self.outcome
        outcome.add_late(dict.fromkeys(self._open))
        self._open.clear()  # with the weights that the steps hold
        outcome.dead = dict(sorted(outcome.dead.items()))
        outcome.failed = dict(sorted(outcome.failed.items()))
        outcome.check(what, self.version)

    def _advance_all(self) -> bool:
        """Take in the answers that are there, and begin what comes next. Are all workers done?"""
        for index in list(self._open):
            transport = self.workers[index]
            try:
                self._advance(transport, self._open[index])
                continue
            except StopIteration:
                self.outcome.done.append(index)
            except Dead as dead:
                self.outcome.dead[index] = str(dead)
                transport.node = None  # it may start again elsewhere
                transport.reported = dead.final
            except Failed as failed:
                self.outcome.failed[index] = failed.failure
                for each in self.workers.values():
                    each.node = None  # it may have been started again elsewhere, or be led by one that was
            self._open.pop(index).close()
        return not self._open

    def _advance(self, transport: RemoteTransport, steps: Steps) -> None:
        request, answer = transport.request, None
        if request is not None:
            if not request.done():
                return
            transport.request, mine = None, transport.exchange is self
            try:
                answer = transport.answer(request)
            except Failed:
                if mine:
                    raise
            if not mine:  # of an earlier send: this one has not begun
                answer = None
        transport.request, transport.exchange = steps.send(answer), self


# ---- what the user has


class RemoteScheme(WeightSyncScheme):
    """What the schemes beyond one machine have in common.

    Args:
        strategy: the form in which weights travel, "state_dict" or "tensordict".
        fan_out: None: each worker gets its own copy of the weights, and copies them into its model. "node", for Ray and
            torch.distributed: one copy goes to each node, where one worker publishes it into an arena, to which all of
            the node's workers attach.
        slots: of those arenas; see Publisher.
        consistency: of their subscribers; see Subscriber.
        timeout: default of every call, in seconds; math.inf waits without limit, None is 60.
        partial: see WeightSyncScheme. With fan_out="node" the first send to a node has all leaves.
        dtype: see WeightSyncScheme.
    """

    make_fan_out: ClassVar[Any] = None  # NodeFanOut (nodes.py), where the engine has transport.call()

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
        if fan_out == "node" and self.make_fan_out is None:
            raise ValueError(f'{type(self).__name__} has no fan_out="node"; each of its workers gets its own copy')
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
        scheme, self._packer = self._scheme, Packer()
        self.default_timeout = scheme.timeout
        self._nodes: Any = None if scheme.fan_out is None else scheme.make_fan_out(scheme, self._packer.session)

    @override
    def _find_workers(self, arguments: Arguments) -> None:
        workers = self._scheme.workers(arguments)
        arguments.check_count(workers, "workers", "num_workers", "num_collectors")
        for index, worker in enumerate(workers):
            self.register_worker(index, worker)

    def resend(self, worker_ids: int | Sequence[int] | None = None, *, timeout: float | None = None) -> int:
        """Send the last weights again, to all workers or to these, such as those that joined late.

        Returns their version, 0 if nothing was sent yet. With partial=True, all that the model of init_on_sender() has
        now is sent; that, and with fan_out="node" the last weights too, is a new version. Raises as send() does.
        """
        deadline = deadline_after(timeout, self.default_timeout)
        with self._one_at_a_time("resend", deadline):
            packed = self._packer.newest
            if packed is None:
                return 0
            workers = self._chosen(worker_ids)
            if self._scheme.partial:
                posted: Posted = self._post(self._source(None), workers, deadline)
            else:
                if self._nodes is not None:  # an arena has each version once
                    packed.label = packed.label._replace(version=self._version + 1)
                posted = self._begin(packed, self._reachable(workers), deadline)
            self._gather(posted, deadline)
            return posted.version

    @override
    def _post(self, source: Any, workers: list[int], deadline: float) -> Exchange:
        reachable = self._reachable(workers)
        packed = self._packer.pack(source, self._model_id, self._version + 1)
        return self._begin(packed, reachable, deadline)

    def _reachable(self, workers: list[int]) -> dict[int, RemoteTransport]:
        """The transports of a send to these workers. Raises WorkerDied when all of them are dead."""
        reachable = {index: transport for index, transport in self._living(workers).items() if transport.connected}
        if self._nodes is not None:
            self._nodes.check(reachable, self._transports)
        return reachable

    def _begin(self, packed: PackedWeights, transports: dict[int, RemoteTransport], deadline: float) -> Exchange:
        self._version = packed.label.version  # now: a worker may have it although this raises
        if self._nodes is not None:
            exchange: Exchange = self._nodes.post(packed, transports, deadline)
            return exchange
        content = next(iter(transports.values())).wrap(packed) if transports else None
        return Exchange(packed.label.version, transports, lambda index: one_step(transports[index], content))

    @override
    def _gather(self, posted: Posted, deadline: float) -> None:
        assert isinstance(posted, Exchange)
        posted.finish(deadline, f"version {posted.version} of {self._model_id!r}")

    def close(self) -> None:
        """End the arena of this node, if there is one. Idempotent."""
        if self._nodes is not None:
            self._nodes.close()


receivers: weakref.WeakSet[RemoteReceiver] = weakref.WeakSet()  # in this process, with a model


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
        self._attached: Attachment | None = None  # to the arena of its node

    @override
    def _connect(self, arguments: Arguments) -> None:
        receivers.add(self)

    @property
    @override
    def version(self) -> int:
        """The version that the model uses now; 0: as it came. With fan_out="node" each forward uses the newest."""
        return self._version if self._attached is None else self._attached.version

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
            if isinstance(weights, News):
                self._attach(weights, model)
            else:
                self._strategy.apply_weights(model, weights)
            self._version = self._version + 1 if label is None else label.version
        self._news.set()

    def _attach(self, news: News, model: Any) -> None:
        """Use the arena, which takes the place of an earlier one, at this version."""
        if self._attached is None or self._attached.handle != news.handle:
            made = Attachment(news.handle, self._scheme, self.worker_idx)
            self._leave()  # a module is bound to one arena
            self._attached = made
        try:
            self._attached.move_to(news.label.version)
            self._attached.bind(model)
        except ManifestMismatch:
            self._leave()  # an arena that nobody can use is made anew
            raise
        if isinstance(model, nn.Module):
            for path, state in news.label.extra.items():
                model.get_submodule(".".join(path)).set_extra_state(state)

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
        """Leave the arena; a bound module raises ClosedError when it is called from now on."""
        with self._applying:
            self._leave()

    def _leave(self) -> None:
        if self._attached is not None:
            self._attached.close()
            self._attached = None
