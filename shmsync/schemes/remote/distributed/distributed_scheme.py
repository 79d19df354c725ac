"""Weights for the ranks of torch.distributed.

A connection to each rank announces and answers, and the process group moves the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from typing_extensions import override

from ....engine.deadlines import deadline_after, timeout_or_none
from ....engine.source.dtypes import Dtypes
from ....engine.subscriber import Consistency
from ...context_args import Arguments
from ...link.send_lock import TryHold
from ...strategy import Form, WeightStrategy
from ..location import Site
from ..relay import RelayOptions
from ..remote_carrier import Carrier
from ..remote_receiver import RemoteReceiver
from ..remote_requests import Call, Destination, RemoteSend, Step
from ..remote_scheme import RemoteScheme, Roster
from ..remote_transport import RemoteTransport, checked_word
from .group_transfers import InitialReceiver, InitialSender, initial_end, need_group
from .rank_inbox import Inbox
from .rank_messages import UPDATED
from .rank_sender import RankEnd, wait_for

_STRATEGY = WeightStrategy()


class DistributedCarrier(Carrier):
    """torch.distributed: the relay of a node is the first of its ranks that lives.

    A rank takes one message at a time, so there is no HostedRelay: messages for the relay and for the rank take turns.
    """

    @override
    def wait(self, calls: Collection[Call], seconds: float) -> None:
        wait_for(calls, seconds)

    @override
    def locate(self, worker: DistributedTransport) -> Call:
        return worker.sender_end.ask_location()

    @override
    def start_relay(
        self, site: Site, members: Mapping[int, DistributedTransport], options: RelayOptions
    ) -> DistributedTransport:
        return members[min(members)]

    @override
    def relay_call(self, relay: DistributedTransport, payload: Any, options: RelayOptions) -> Call:
        return relay.sender_end.post(payload, relay=options)

    @override
    def close_relay(self, relay: DistributedTransport, session: str, *, until: float | None) -> None:
        if not relay.busy and not relay.reported:
            relay.sender_end.close_relay(session, ended=until is not None)


class DistributedTransport(RemoteTransport):
    """Reaches one rank; in that rank's process, reaches the sender.

    Args:
        weights_buffer: a TensorDict that receive_weights() fills; None: it gives views of its own buffer.
        store: a store that both processes use. None: every call does nothing.
        rank: the worker's. None: every call does nothing.
        sync: kept for code that has it; both kinds of transfer end by the deadline.
        timeout: seconds that a send waits, and that a transfer may take; math.inf waits without limit.

    The default process group of torch.distributed (gloo) moves the tensors.
    """

    def __init__(
        self,
        *,
        weights_buffer: Any = None,
        store: Any = None,
        rank: int | None = None,
        sync: bool = True,
        timeout: float | None = 60.0,
    ) -> None:
        super().__init__(DistributedCarrier(), timeout)
        self.weights_buffer = weights_buffer
        self.store = store
        self.rank = rank
        self.sync = sync
        self.outbox = None if store is None or rank is None else RankEnd(store, rank)
        self.inbox = None if store is None or rank is None else Inbox(store, rank)

    # The sender's side.

    @property
    @override
    def connected(self) -> bool:
        return self.outbox is not None

    @property
    @override
    def busy(self) -> bool:
        return super().busy or (self.outbox is not None and self.outbox.busy)

    @property
    def sender_end(self) -> RankEnd:
        """Of a transport that is connected."""
        assert self.outbox is not None, "this transport has no rank"
        return self.outbox

    @property
    @override
    def host(self) -> DistributedTransport:  # type: ignore[override]  # an attribute would be a circle
        """Where it is a relay: this rank."""
        return self

    @override
    def start_call(self, payload: Any) -> Call:
        return self.sender_end.post(payload)

    def send_initial_weights(self, weights: Any) -> None:
        """Send weights without the store, to a worker that is in receive_initial_weights(), which asks rank 0 for them.

        Raises TimeoutError when the worker does not take part in time, ProtocolError without a process group.
        """
        if self.rank is not None:
            need_group()
            initial_end(InitialSender, self.rank).send(self._packer.pack(weights, "policy", 0), self.timeout)

    @override
    def check_ack(self, message: str = "updated", *, timeout: float | None = None) -> None:
        """Wait for the answer to the last send_weights_async(), which should be `message`.

        With none pending it waits for the next word that the worker says with send_ack().

        Raises RuntimeError for another word, AckTimeout when none comes in time.
        """
        timeout = timeout_or_none(timeout)
        outbox = self.outbox
        word = checked_word(message)
        if outbox is None:
            self.wait_ack(timeout=timeout)
        elif self._pending is not None:
            outbox.expected = word
            try:
                self.wait_ack(timeout=timeout)
            finally:
                outbox.expected = UPDATED
        else:
            sending = RemoteSend(self._carrier.wait)
            alone = Destination()  # no other send waits for this one's calls
            sending.add(Step(0, alone, partial(outbox.wait_word, word)))
            sending.finish(deadline_after(timeout, self.timeout))
            sending.check(f"a message that {message!r} answers", None, {})

    # The worker's side.

    @override
    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> tuple[str, Any] | None:
        """The next weights as (model_id, weights); None when there are none within `timeout` seconds.

        Args:
            timeout: None is the transport's own.
            weights: a TensorDict or a dict to copy into; None: the constructor's. Without either the result shows a
                buffer that the next message overwrites.
            model: a module, TensorDict or dict to apply them to.
            strategy: how; None: in whatever form they come.

        send_ack() answers. Raises ManifestMismatch for weights that fit neither, WriterDied when the sender is gone.
        """
        deadline = deadline_after(timeout, self.timeout)
        if self.inbox is None:
            return None
        target = self.weights_buffer if weights is None else weights
        given = [destination for destination in (target, model) if destination is not None]
        received = self.inbox.receive_weights(deadline, given, strategy or _STRATEGY)
        return received if received is None or target is None else (received[0], target)

    @override
    def send_ack(self, message: str = "updated") -> None:
        """Answer what receive_weights() returned last, with this message; without one it is a word of the worker's own.

        Raises WriterDied when the store cannot be reached, before the first word or message.
        """
        if self.inbox is not None:
            self.inbox.acknowledge(message)

    def receive_initial_weights(self) -> Any:
        """What rank 0 sends with send_initial_weights(); None without a rank. Raises TimeoutError after `timeout`."""
        if self.rank is None:
            return None
        need_group()
        weights = initial_end(InitialReceiver).receive(self.timeout)
        if self.weights_buffer is None:
            return weights
        _STRATEGY.apply_weights(self.weights_buffer, weights)
        return self.weights_buffer

    # Either side.

    @override
    def check_connection(self) -> bool:
        """Is there a process group in this process?"""
        return bool(torch.distributed.is_initialized())

    def setup_connection_and_weights_on_sender(self) -> None:
        """Nothing: init_process_group() has made the connection."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int, weights: Any = None, model: Any = None, strategy: WeightStrategy | None = None
    ) -> None:
        """Nothing: init_process_group() has made the connection.

        worker_idx, weights, model and strategy are there for TorchRL's sake.
        """

    @override
    def close(self) -> None:
        """Watch the other side no more. Idempotent."""
        super().close()
        for end in (self.outbox, self.inbox):
            if end is not None:
                end.close()


class DistributedWeightSyncScheme(RemoteScheme):
    """Sends each rank of torch.distributed, or with fan_out="node" each node, one flat buffer; receive() applies it.

    Args:
        backend: "gloo", the one that is supported; init_process_group() is called by the user.
        sync: kept for code that has it; both ways end by the deadline.
        strategy: see RemoteScheme.
        fan_out: see RemoteScheme. The relay of a node is one of its ranks.
        slots: see RemoteScheme.
        consistency: see RemoteScheme.
        timeout: see RemoteScheme.
        partial: see RemoteScheme.
        dtype: see RemoteScheme.

    init_on_sender() takes `store`, which all ranks use (else the default process group's); `ranks`, or `num_workers`
    for the ranks 1 to num_workers (else every rank but this one); `model` (or `source_model`). init_on_worker() takes
    `store` and `rank` (else the default process group's) and `model`, and writes into the store where senders reach
    this rank. Each may be an argument or come from the context, which is held weakly. Both raise ProtocolError without
    a process group when one is needed.
    """

    sender_takes = RemoteScheme.sender_takes | {"store", "ranks"}
    worker_takes = RemoteScheme.worker_takes | {"store", "rank"}

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        *,
        strategy: Form = "state_dict",
        fan_out: Literal["node"] | None = None,
        slots: int = 1,
        consistency: Consistency = "pinned",
        timeout: float | None = 60.0,
        partial: bool = False,
        dtype: Dtypes = None,
    ) -> None:
        super().__init__(
            strategy,
            fan_out=fan_out,
            slots=slots,
            consistency=consistency,
            timeout=timeout,
            partial=partial,
            dtype=dtype,
        )
        if backend != "gloo":
            raise ValueError(f'backend is "gloo", not {backend!r}; weights on a GPU are fetched before they are sent')
        self.backend = backend
        self.sync = sync

    @override
    def create_transport(self, pipe_or_context: Any) -> DistributedTransport:
        """The transport to a rank, given as (store, rank)."""
        store, rank = pipe_or_context if pipe_or_context is not None else (None, None)
        return DistributedTransport(store=store, rank=rank, sync=self.sync, timeout=self.timeout)

    @override
    def create_carrier(self) -> DistributedCarrier:
        return DistributedCarrier()

    @override
    def roster(self, arguments: Arguments) -> Roster:
        ranks: Sequence[int] | None = arguments.get("ranks")
        if ranks is None:
            count = arguments.count("num_workers")
            if count is not None:
                ranks = range(1, count + 1)
            else:
                need_group("ranks= or num_workers=")
                ranks = [r for r in range(torch.distributed.get_world_size()) if r != torch.distributed.get_rank()]
        store = _store(arguments)
        return Roster(lambda: [(store, rank) for rank in ranks], "ranks", live=False)

    @override
    def create_receiver(self) -> DistributedReceiver:
        return DistributedReceiver(self)


def _store(arguments: Arguments) -> Any:
    """The store for a model: each model but "policy" has its own keys."""
    store = arguments.get("store")
    if store is None:
        need_group("store=")
        store = torch.distributed.PrefixStore("shmsync", torch.distributed.distributed_c10d._get_default_store())
    if arguments.model_id != "policy":
        store = torch.distributed.PrefixStore(arguments.model_id, store)
    return store


class DistributedReceiver(RemoteReceiver):
    """Applies what has come at receive(), on the thread that calls it."""

    _transport: DistributedTransport

    @override
    def set_up(self, arguments: Arguments) -> None:
        super().set_up(arguments)
        rank = arguments.get("rank")
        if rank is None:
            need_group("rank=")
            rank = torch.distributed.get_rank()
        self._register_worker_transport((_store(arguments), rank))
        if self._transport.inbox is not None:
            self._transport.inbox.introduce(self._scheme.timeout)

    @override
    def receive(self, timeout: float | None = 0.001) -> bool:
        """Apply what has arrived, and answer. What cannot be applied raises in the sender; the model is unchanged.

        Args:
            timeout: seconds to wait for the first message; 0 only looks, None is the scheme's.

        Raises WriterDied when the sender dies in the middle of a transfer, or when no sender is there and the store
        cannot be reached; ValueError without a model.
        """
        self._scheme.check_open("receive")
        deadline = deadline_after(timeout, self._scheme.timeout)
        inbox = None if self._transport is None else self._transport.inbox
        if inbox is None or self.subscriptions.inside_section(self._model_id):
            return False
        with TryHold(inbox.lock, deadline) as hold:
            message = inbox.next(deadline) if hold.taken else None
            if message is None:
                return False
            try:
                super().apply_weights(inbox.unpack(message))
            except BaseException as error:
                inbox.fail(message, error)
                if not isinstance(error, Exception):
                    raise
                self._resolve_model_ref()  # a receiver without a model raises here too
                return False
            inbox.answer(message)
            return True

    @override
    def close(self) -> None:
        super().close()
        if self._transport is not None:
            self._transport.close()
