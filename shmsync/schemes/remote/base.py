"""A send to workers beyond this machine: one request to each worker, and one wait for all answers.

A send goes through these, in this order:

    Packer.pack()         the weights, once: one flat buffer, laid out as a slot of an arena is, and a label
    transport.wrap()      what the engine sends of them, made once for all workers
    transport.start()     a request to each worker; the engine's file says how it travels
    Exchange.finish()     the only wait: until every request is done, or the deadline; its Outcome raises
    apply_weights()       in the worker: copies the weights into the model

INV: a worker has at most one request under way. One that still owes an answer to an earlier send is waited for within
the deadline, then named late, and gets nothing new. So its late answer counts for nothing but itself.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent import futures
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy
import torch
from tensordict import TensorDictBase
from torch import nn
from typing_extensions import override

from ... import _native
from ...engine.deadlines import SLICE, deadline_after, timeout_or_default, timeout_or_none
from ...engine.outcome import Failure, Outcome, Wording
from ...engine.source.dtypes import Dtypes
from ...engine.source.manifest_check import direct
from ...engine.source.sources import check_keys
from ...engine.subscriber import Consistency
from ...errors import ManifestMismatch
from ...memory.arena import nested, view
from ...memory.devices import laid_out
from ...memory.manifest import Key, Manifest
from ...memory.segment import Handle
from ...memory.torch_modes import run_plainly
from ..api import WeightSyncScheme
from ..attachment import Attachment
from ..context import Arguments
from ..receiver import WeightReceiver
from ..sender import Posted, WeightSender
from ..strategy import STATE_KEY, Form, leaves_of, refuse_odd

DEFAULT_TIMEOUT = 60.0  # seconds
WORDING = Wording("its process may be starting, stopped, or busy with a call that came before")


# ---- the weights on their way


class Label(NamedTuple):
    """Which weights a buffer has, and where in it."""

    session: str  # of the sender; another trainer begins its versions again
    model_id: str
    version: int
    is_tensordict: bool  # else it unpickles as a flat dict
    manifest: bytes  # JSON
    extra: dict[Key, Any]  # what modules keep beside their tensors


class News(NamedTuple):
    """Weights that lie in an arena of the worker's node. WeightReceiver.apply_weights() takes them like others."""

    label: Label  # without a manifest: the arena has it
    handle: Handle


class PackedWeights:
    """Weights in a buffer. Unpickles as the weights themselves, with their label as `.label`.

    The tensors are then views of the received buffer. Under Ray that is the object store, which all actors of a node
    map, so views go only to models whose receiver is in the process: it copies them. Others get a private copy.
    """

    def __init__(self, label: Label, buffer: Any) -> None:
        self.label = label
        self.buffer = buffer  # uint8: a tensor, or an array, which Ray writes into its store without pickling it

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.label, self.buffer)


class Packer:
    """Packs weights, into the same buffer as long as nobody reads that: fresh memory costs more than the copy.

    INV: a reader of a buffer keeps its PackedWeights.
    """

    def __init__(self) -> None:
        self.session = secrets.token_hex(8)
        self.newest: PackedWeights | None = None  # what resend() brings
        self._free: deque[torch.Tensor] = deque(maxlen=1)
        self._layout: tuple[Any, Manifest, bytes] | None = None  # of the last weights, by what they are made of

    @run_plainly
    def pack(self, weights: Any, model_id: str, version: int) -> PackedWeights:
        """Copy weights, once. Raises ManifestMismatch for leaves that are no plain tensors."""
        tensors, extra = leaves_of(weights)
        refuse_odd(tensors)
        check_keys(tensors)
        made_of = [(key, t.dtype, t.shape, t.stride(), t.data_ptr()) for key, t in tensors.items()]
        if self._layout is None or self._layout[0] != made_of:
            manifest = Manifest.of(tensors)
            self._layout = made_of, manifest, manifest.to_json()
        _, manifest, text = self._layout
        self.newest = None  # its buffer is free now, unless somebody reads it
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes != manifest.used_bytes:
            buffer = torch.empty(manifest.used_bytes, dtype=torch.uint8, device="cpu")
        rows, kept = [], []
        for leaf in {leaf.offset: leaf for leaf in manifest.leaves if leaf.nbytes}.values():
            source = tensors[leaf.key]
            if not direct(source, leaf):
                source = laid_out(source.detach().cpu().resolve_conj().resolve_neg(), leaf.strides)
            kept.append(source)  # until it is copied
            rows.append((buffer.data_ptr() + leaf.offset, source.data_ptr(), leaf.nbytes))
        _native.copy(rows)
        label = Label(self.session, model_id, version, isinstance(weights, TensorDictBase), text, extra)
        self.newest = PackedWeights(label, buffer)
        weakref.finalize(self.newest, self._free.append, buffer).atexit = False
        return self.newest


class WeightsDict(dict[str, Any]):
    """A state_dict that came from a sender."""

    label: Label


@run_plainly
def unpack(label: Label, buffer: torch.Tensor | numpy.ndarray) -> Any:
    """The weights that were sent, as a TensorDict or a dict of views of the buffer, with their label."""
    if isinstance(buffer, numpy.ndarray):
        if not buffer.nbytes or all(receiver.model_id != label.model_id for receiver in list(_receivers)):
            buffer = torch.from_numpy(buffer.copy())
        else:  # from_numpy() would warn each time that it is read-only
            memory = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ctypes.data)
            memory.array = buffer  # type: ignore[attr-defined]  # keeps it
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
    storage = buffer.untyped_storage()
    views = {leaf.key: view(storage, leaf, leaf.offset) for leaf in _parsed(label.manifest).leaves}
    weights: Any = nested(views)
    if not label.is_tensordict:
        weights = WeightsDict({".".join(key): each for key, each in views.items()} | by_name(label.extra))
    weights.label = label
    return weights


def by_name(extra: Mapping[Key, Any]) -> dict[str, Any]:
    """Extra state as a state_dict() has it."""
    return {".".join((*path, STATE_KEY)): state for path, state in extra.items()}


@lru_cache(maxsize=16)
def _parsed(text: bytes) -> Manifest:
    return Manifest.from_json(text, 2**63)


def label_of(weights: Any) -> Label | None:
    """The label of weights that a sender of ours sent."""
    label = getattr(weights, "label", None)
    return label if isinstance(label, Label) else None


# ---- one worker


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
        """Until all of these requests are done; at most so many seconds."""
        futures.wait(requests, seconds)

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
        self._pending = Exchange(self._sent, reached, lambda *_: one_step(self, content))

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


Steps = Generator[Any, Any, None]  # yields requests, gets answers; None: it waits for another worker


def one_step(transport: RemoteTransport, content: Any) -> Steps:
    """The one request of a worker that gets the weights themselves."""
    yield transport.start(content)


class Exchange(Posted):
    """A send under way. What needs no waiting is begun at once.

    Args:
        version: of the weights.
        transports: by worker.
        steps: gives the requests of a worker, one after the other; each gets the answer to the last.
        wording: of the errors.

    Attributes:
        open: what is to come, by worker; those that are done are not in it.
    """

    def __init__(
        self,
        version: int,
        transports: Mapping[int, RemoteTransport],
        steps: Callable[[Exchange, int], Steps],
        wording: Wording = WORDING,
    ) -> None:
        super().__init__(version, transports, outcome=Outcome(wording))
        self.open = {index: steps(self, index) for index in transports}
        self._advance_all()

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

    def _advance_all(self) -> None:
        while any(list(map(self._advance, list(self.open)))):
            pass  # where one worker is done, another may begin

    def _advance(self, index: int) -> bool:
        """Take in the answer of this worker, if it is there, and begin what comes next. Has anything changed?"""
        transport = self.workers[index]
        request, exchange, answer = transport.request, transport.exchange, None
        try:
            if request is not None:
                if not request.done():
                    return False
                transport.request = transport.exchange = None
                try:
                    answer = transport.answer(request)
                except Failed:
                    if exchange is self:
                        raise
            begun = self.open[index].send(answer if exchange is self else None)  # else this one has not begun
            if begun is not None:
                transport.request, transport.exchange = begun, self
            return begun is not None
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
        if isinstance(source, PackedWeights):
            packed = source
        else:
            version = self._version + 1
            if self._nodes is not None:
                self._version = version  # now: a node may have it although this raises
                label = Label(self._packer.session, self._model_id, version, True, b"", {})
                exchange: Exchange = self._nodes.post(source, label, connected, self._transports, deadline)
                return exchange
            packed = self._packer.pack(source, self._model_id, version)
            self._version = version
        content = next(iter(connected.values())).wrap(packed) if connected else None
        return Exchange(packed.label.version, connected, lambda _, index: one_step(connected[index], content))

    @override
    def _gather(self, posted: Posted, deadline: float) -> None:
        assert isinstance(posted, Exchange)
        posted.finish(deadline, f"version {posted.version} of {self._model_id!r}")

    def close(self) -> None:
        """End the arena of this node, if there is one. Idempotent."""
        if self._nodes is not None:
            self._nodes.close()


_receivers: weakref.WeakSet[RemoteReceiver] = weakref.WeakSet()  # in this process, with a model


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
        _receivers.add(self)

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

    def _attach(self, news: News, model: Any) -> None:
        """Let the model use the arena, which takes the place of an earlier one, at this version."""
        if self._attached is None or self._attached.handle != news.handle:
            made = Attachment(news.handle, self._scheme, self._worker_idx)
            try:
                made.check_whole(model)  # with partial= too
            except ManifestMismatch:
                made.close()  # an arena that nobody can use is made anew
                raise
            self._leave()  # a module is bound to one arena
            self._attached = made
        try:
            self._attached.move_to(news.label.version)
            self._attached.bind(model)
        except ManifestMismatch:
            self._leave()
            raise
        if isinstance(model, nn.Module):
            for path, state in news.label.extra.items():
                model.get_submodule(".".join(path)).set_extra_state(state)

    @override
    def close(self) -> None:
        """Leave the arena; a bound module raises ClosedError when it is called from now on."""
        with self._applying:
            self._leave()

    def _leave(self) -> None:
        if self._attached is not None:
            self._attached.close()
            self._attached = None
