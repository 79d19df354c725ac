"""Weights for the ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from ....engine.deadlines import deadline_after
from ....engine.source.dtypes import Dtypes
from ....engine.source.strategy import Form
from ....engine.subscriber import Consistency
from ...context_args import Arguments
from ..remote_receiver import RemoteReceiver
from ..remote_scheme import RemoteScheme, Roster
from .distributed_transport import DistributedCarrier, DistributedTransport
from .transfers import need_group


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
        checksum: see RemoteScheme.

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
        checksum: bool = False,
    ) -> None:
        super().__init__(
            strategy,
            fan_out=fan_out,
            slots=slots,
            consistency=consistency,
            timeout=timeout,
            partial=partial,
            dtype=dtype,
            checksum=checksum,
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
        return DistributedReceiver(self, consistency=self.consistency, timeout=self.timeout)


def _store(arguments: Arguments) -> Any:
    """The store for a model: each model but "policy" has keys of its own."""
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
            self._transport.inbox.introduce(self._timeout)

    @override
    def receive(self, timeout: float | None = 0.001) -> bool:
        """Apply what has arrived, and answer. What cannot be applied raises in the sender; the model is unchanged.

        Args:
            timeout: seconds to wait for the first message; 0 only looks, None is the scheme's.

        Raises WriterDied when the sender dies in the middle of a transfer, or when no sender is there and the store
        cannot be reached; ValueError without a model.
        """
        self._scheme.check_open("receive")
        deadline = deadline_after(timeout, self._timeout)
        inbox = None if self._transport is None else self._transport.inbox
        if inbox is None or self.subscriptions.inside_section(self._model_id):
            return False
        with inbox.lock(deadline) as turn:
            message = inbox.next(deadline) if turn.taken else None
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
