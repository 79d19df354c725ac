"""The transport over torch.distributed: a connection to each rank announces and answers, the process group moves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from ....engine.deadlines import deadline_after, timeout_or_none
from ....engine.source.strategy import WeightStrategy
from ..delivery import APART, Deliveries, Delivery
from ..location import Site, here
from ..packed_weights import PackedWeights, Stamp
from ..relay import RelayOptions
from ..remote_carrier import Carrier
from ..remote_requests import Call, Destination, RemoteSend
from ..remote_transport import RemoteTransport, checked_word
from .initial_weights import initial_receiver, initial_sender
from .rank_messages import UPDATED
from .rank_sender import RankEnd, wait_for
from .rank_worker import Inbox
from .transfers import need_group

_STRATEGY = WeightStrategy()


class DistributedCarrier(Carrier):
    """torch.distributed: the relay of a node is the first of its ranks that lives.

    A rank takes one message at a time, so there is no HostedRelay: messages for the relay and for the rank take turns.
    """

    shared_from = APART

    def __init__(self) -> None:
        self._deliveries = Deliveries(lambda: "127.0.0.1", here)  # for ranks that share memory with this process

    @override
    def payload(self, packed_weights: PackedWeights) -> Delivery:
        """Ranks on this node read them where they lie; to others the process group moves them."""
        return self._deliveries.ship(packed_weights, self.deadline, lambda start: start(packed_weights))

    @override
    def close(self) -> None:
        self._deliveries.close()

    @override
    def wait(self, calls: Collection[Call], seconds: float) -> None:
        wait_for(calls, seconds)

    @override
    def locate(self, worker: DistributedTransport) -> Call:
        return worker.sender_end.ask_place()

    @override
    def start_relay(
        self, site: Site, members: Mapping[int, DistributedTransport], options: RelayOptions
    ) -> DistributedTransport:
        return members[min(members)]

    @override
    def relay_call(self, relay: DistributedTransport, payload: Any, options: RelayOptions) -> Call:
        return relay.sender_end.post(payload, relay=options)

    @override
    def lone_relay(self, worker: DistributedTransport) -> DistributedTransport:
        return worker

    @override
    def lone_call(self, worker: DistributedTransport, payload: Any, options: RelayOptions, stamp: Stamp) -> Call:
        return worker.sender_end.post(payload, relay=options, lone=True)

    @override
    def close_relay(self, relay: DistributedTransport, session: str, *, ended: bool) -> None:
        if not relay.busy and not relay.reported:
            relay.sender_end.close_relay(session, ended=ended)


class DistributedTransport(RemoteTransport):
    """Reaches one rank; in that rank's process, reaches the sender.

    Args:
        weights_buffer: a TensorDict that receive_weights() fills; None: it gives views of a buffer of its own.
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
    def host(self) -> DistributedTransport:
        return self  # where it is a relay

    @override
    def start_call(self, payload: Any) -> Call:
        return self.sender_end.post(payload, near=self.out_of_reach is None)

    def send_initial_weights(self, weights: Any) -> None:
        """Send weights without the store, to a worker that is in receive_initial_weights(), which asks rank 0 for them.

        Raises TimeoutError when the worker does not take part in time, ProtocolError without a process group.
        """
        if self.rank is not None:
            need_group()
            initial_sender(self.rank).send(self._packer.pack(weights, "policy", 0), self.timeout)

    @override
    def check_ack(self, message: str = "updated", *, timeout: float | None = None) -> None:
        """Wait for the answer to the last send_weights_async(), which should be `message`.

        With none pending it waits for the next word that the worker says with send_ack().

        Raises RuntimeError for another word, AckTimeout when none comes in time.
        """
        timeout = timeout_or_none(timeout)
        outbox = self.outbox
        word = checked_word(message)
        if outbox is None or self.pending:
            if outbox is not None:
                outbox.expected = word
            try:
                self.wait_ack(timeout=timeout)
            finally:
                if outbox is not None:
                    outbox.expected = UPDATED
            return
        sending = RemoteSend(self._carrier.wait)
        sending.ask(0, Destination(), partial(outbox.wait_word, word))  # which keeps no send waiting afterwards
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
        weights = initial_receiver().receive(self.timeout)
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
