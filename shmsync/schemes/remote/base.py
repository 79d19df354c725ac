"""A send to workers beyond this machine: one request to each worker, and one wait for all answers.

A send goes through these, in this order:

    Packer.pack()         the weights, once, into one flat buffer (packing.py)
    transport.wrap()      what the engine sends of them, made once for all workers
    transport.start()     a request to each worker; the engine's file says how it travels
    Exchange.finish()     the only wait: until every request is done, or the deadline; its Outcome raises
    apply_weights()       in the worker: copies the weights into the model (receiver.py)

INV: a worker has at most one request under way. One that still owes an answer to an earlier send is waited for within
the deadline, then named late, and gets nothing new. So its late answer counts for nothing but itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from concurrent import futures
from typing import Any, ClassVar, Literal

from typing_extensions import override

from ...engine.deadlines import SLICE, deadline_after, timeout_or_default, timeout_or_none
from ...engine.outcome import Failure, Outcome, Wording
from ...engine.source.dtypes import Dtypes
from ...engine.subscriber import Consistency
from ..api import WeightSyncScheme
from ..context import Arguments
from ..sender import Posted, WeightSender
from ..strategy import Form
from .packing import Label, PackedWeights, Packer
from .receiver import RemoteReceiver

DEFAULT_TIMEOUT = 60.0  # seconds
_WORDING = Wording("its process may be starting, stopped, or busy with a call that came before")


# ---- one worker


class Dead(Exception):
    """The process that a request went to is gone. `final`: for good, so later sends leave it out."""

    def __init__(self, how: str, *, final: bool = True) -> None:
        super().__init__(" ".join(how.split())[:300])
        self.final = final


class Failed(Exception):
    """The worker raised, or answered something else."""

    def __init__(self, failure: Failure | str) -> None:
        super().__init__(failure)
        self.failure = failure


class RemoteTransport(ABC):
    """Reaches one worker. Each engine has its own.

    Args:
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits without limit, None is 60.

    Attributes:
        request: the one that its worker has not answered, as far as was looked: a future.
        exchange: the send that it is part of.
        reported: WorkerDied has named it, so that sends leave it out.
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
        """Send what wrap() gave, or News; a future, done when the worker has applied it. Raises Dead, Failed."""

    def answer(self, request: Any) -> Any:
        """What the worker answered to a request that is done. Raises Dead, Failed."""
        return request.result()

    @staticmethod
    def wait(requests: Sequence[Any], seconds: float) -> None:
        """Until one of these requests is done; at most so many seconds."""
        futures.wait(requests, seconds, futures.FIRST_COMPLETED)

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
        reached: dict[int, RemoteTransport] = {0: self} if self.connected else {}
        content = self.wrap(self._packer.pack(weights, model_id, self._sent + 1)) if reached else None
        self._sent += 1
        self._pending = Exchange(self._sent, reached, {0: content})

    def wait_ack(self) -> None:
        """Wait for the last send_weights_async(). Raises RuntimeError when there was none, and as send_weights()."""
        if self._pending is None:
            raise RuntimeError("no send is pending; call send_weights_async() first")
        exchange, self._pending = self._pending, None
        exchange.finish(deadline_after(None, self.timeout), "the weights")

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """None: the worker gets weights as an argument of a call."""
        timeout_or_none(timeout)
        return None

    def send_ack(self, message: str = "updated") -> None:  # noqa: B027
        """Does nothing: the call's return is the answer."""

    def check_ack(self, message: str = "updated") -> None:
        """As wait_ack(), for the answer "updated"; RuntimeError for another word, which no worker here answers."""
        if message != "updated":
            raise RuntimeError(f"this transport's workers answer 'updated' by returning, and never {message!r}")
        self.wait_ack()

    @abstractmethod
    def check_connection(self) -> bool:
        """Can this process send?"""


# ---- all workers of a send


Steps = Generator[Any, Any, None]  # yields requests, and gets their answers; or yields WAIT
WAIT = object()  # for another worker; it goes on when anything has changed


class Exchange(Posted):
    """A send under way. What needs no waiting is begun at once.

    Args:
        version: of the weights.
        transports: by worker.
        contents: by worker: what start() takes.

    Attributes:
        open: what is to come, by worker; those that are done are not in it.
    """

    def __init__(self, version: int, transports: Mapping[int, RemoteTransport], contents: Mapping[int, Any]) -> None:
        super().__init__(version, transports, outcome=Outcome(_WORDING))
        self._contents = contents
        self.open = {index: self.steps(index) for index in transports}
        self._advance_all()

    def steps(self, index: int) -> Steps:
        """The requests of a worker, one after the other; each gets the answer to the last."""
        yield self.workers[index].start(self._contents[index])

    def finish(self, deadline: float, what: str) -> None:
        """Wait for the answers until the monotonic time `deadline`, and raise what went wrong with `what`."""
        while self.open:
            now = time.monotonic()
            transports = [self.workers[index] for index in self.open]
            requests = [each.request for each in transports if each.request is not None]
            transports[0].wait(requests, max(0.0, min(deadline - now, SLICE)))
            self._advance_all()
            if now >= deadline:
                break
        outcome = self.outcome
        outcome.add_late(dict.fromkeys(self.open))
        outcome.dead = dict(sorted(outcome.dead.items()))
        outcome.failed = dict(sorted(outcome.failed.items()))
        outcome.check(what, self.version)

    def is_behind(self, index: int) -> bool:
        """Does this worker still owe an answer to an earlier send, so that it takes no part in this one?"""
        transport = self.workers[index]
        return transport.request is not None and transport.exchange is not self and not transport.request.done()

    def _advance_all(self) -> None:
        while any(list(map(self._advance, list(self.open)))):
            pass  # where one worker is done, another may begin

    def _advance(self, index: int) -> bool:
        """Take in the answer of this worker, if it is there, and begin what comes next. Has anything changed?"""
        transport = self.workers[index]
        if transport.request is not None and not transport.request.done():
            return False
        try:
            begun = self.open[index].send(self._take_answer(transport))
            if begun is WAIT:
                return False
            transport.request, transport.exchange = begun, self
            return True
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
        del self.open[index]
        return True

    def _take_answer(self, transport: RemoteTransport) -> Any:
        """The answer to the request that is done; None for one of an earlier send, and without one."""
        request, is_ours = transport.request, transport.exchange is self
        transport.request = transport.exchange = None
        try:
            answer = None if request is None else transport.answer(request)
        except Failed:
            if is_ours:
                raise
            return None
        return answer if is_ours else None


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
        partial: see WeightSyncScheme; not with fan_out="node".
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
        if fan_out == "node" and partial:
            raise ValueError('with fan_out="node" a send has every leaf; leave partial= out, or use fan_out=None')
        self.fan_out = fan_out
        self.slots = slots
        self.consistency: Consistency = consistency
        self.timeout = timeout_or_default(timeout, DEFAULT_TIMEOUT)

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
    _links: dict[int, RemoteTransport]

    @override
    def _start_here(self) -> None:
        super()._start_here()
        scheme, self._packer = self._scheme, Packer()
        self.default_timeout = scheme.timeout
        self._nodes: Any = None if scheme.fan_out is None else scheme.make_fan_out(scheme, self._packer)

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
            source: Any = self._packer.newest if self._nodes is None else self._nodes.last_weights()
            if source is None:
                return 0
            if self._scheme.partial:
                source = self._source(None)
            posted = self._post(source, self._chosen(worker_ids), deadline)
            self._gather(posted, deadline)
            return posted.version

    @override
    def _post(self, source: Any, workers: list[int], deadline: float) -> Posted:
        """Begin a send. `source`: weights, or packed ones with the version that they have."""
        living = self._living(workers)
        connected = {index: transport for index, transport in living.items() if transport.connected}
        if self._nodes is not None:
            left_out = [index for index in self._living(self.worker_ids) if index not in living]
            if left_out:
                raise ValueError(
                    f'with fan_out="node" the workers of a node share one arena, so a send goes to all workers, and '
                    f"workers {left_out} are left out; send to all, or use fan_out=None"
                )
            self._version += 1  # now: a node may have it although this raises
            label = Label(self._packer.session, self._model_id, self._version, True, {})
            return self._nodes.post(source, label, connected, deadline)
        packed = source
        if not isinstance(source, PackedWeights):
            packed = self._packer.pack(source, self._model_id, self._version + 1)
            self._version += 1
        content = next(iter(connected.values())).wrap(packed) if connected else None
        return Exchange(packed.label.version, connected, dict.fromkeys(connected, content))

    @override
    def _gather(self, posted: Posted, deadline: float) -> None:
        assert isinstance(posted, Exchange)
        posted.finish(deadline, f"version {posted.version} of {self._model_id!r}")

    def close(self) -> None:
        """End the arena of this node, if there is one. Idempotent."""
        if self._nodes is not None:
            self._nodes.near.close()
