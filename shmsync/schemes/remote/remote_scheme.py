"""What the schemes for several machines have in common, and their sender."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from typing_extensions import override

from ...engine.deadlines import check_worker, timeout_or_default
from ...engine.source.dtypes import Dtypes
from ...engine.subscriber import Consistency
from ...errors import AckTimeout, WorkerDied
from ..api import WeightSyncScheme
from ..context_args import Arguments
from ..sender import WeightSender
from ..sent_leaves import SentLeaves, private_leaves
from ..strategy import Form
from .fan_out import FanOut
from .packed_weights import Packer, Stamp
from .relay import RelayOptions
from .remote_carrier import Carrier
from .remote_receiver import RemoteReceiver
from .remote_requests import RemoteSend, Step
from .remote_transport import DEFAULT_TIMEOUT, RemoteTransport


class Roster(NamedTuple):
    """The workers of a sender, by their addresses: what the scheme's create_transport() takes for each.

    read: gives the addresses; None: they are as they were.
    name: of the argument that they come from.
    live: True: they are read at each send, so workers join and leave by being in the user's list. False: they are read
        once, and then register_worker() changes them.
    key: addresses with the same key are the same worker, which keeps its transport.
    """

    read: Callable[[], Sequence[Any] | None]
    name: str
    live: bool
    key: Callable[[Any], Any] = lambda address: address


class RemoteScheme(WeightSyncScheme):
    """What the schemes for several machines have in common.

    Args:
        strategy: the form in which weights travel, "state_dict" or "tensordict".
        fan_out: None: each worker gets its own copy of the weights, and copies them into its model. "node": one copy
            goes to each node; a relay publishes it into an arena there, to which all of the node's workers attach.
        slots, consistency: of those arenas and of their subscribers; see Publisher and Subscriber.
        timeout: default of every call, in seconds; math.inf waits without limit, None is 60.
        partial, dtype: see WeightSyncScheme. With fan_out="node" everything ever sent goes to the other nodes
            each time.
    """

    sender_takes = (WeightSyncScheme.sender_takes - {"pipes"}) | {"num_collectors", "source_model"}
    worker_takes = WeightSyncScheme.worker_takes - {"pipe"}

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
        """The transport to one worker, of which a Roster gives what this takes."""

    @abstractmethod
    def create_carrier(self) -> Carrier:
        """The carrier of a sender."""

    @abstractmethod
    def roster(self, arguments: Arguments) -> Roster | None:
        """The workers, from what init_on_sender() got; None: register_worker() brings them."""

    @override
    def create_sender(self) -> RemoteSender:
        return RemoteSender(self)

    @override
    def create_receiver(self) -> RemoteReceiver:
        return RemoteReceiver(self)

    @override
    def init_on_sender(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """See WeightSyncScheme. Called again, it ends the relays, threads and connections of the earlier sender."""
        earlier = self._sender
        super().init_on_sender(model_id, context, **kwargs)
        if isinstance(earlier, RemoteSender):
            earlier.close()

    @override
    def shutdown(self) -> None:
        super().shutdown()
        for end in (self._sender, self._receiver):
            if isinstance(end, (RemoteSender, RemoteReceiver)):
                end.close()


class RemoteSender(WeightSender):
    """Sends to all workers at once, and waits for all of them with one deadline.

    send() also takes in workers that joined or left since the last one, where the scheme can see that.
    """

    _scheme: RemoteScheme
    _transports: dict[int, RemoteTransport]

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self._version = 0
        scheme = self._scheme
        self._carrier = scheme.create_carrier()
        self._packer = Packer()
        self._roster: Roster | None = None
        self._fan_out: FanOut | None = None
        self._sent_leaves = SentLeaves()  # with fan-out and partial=True: an arena that is made later has all of them
        if scheme.fan_out == "node":
            options = RelayOptions(scheme.slots, scheme.timeout, scheme.partial)
            self._fan_out = FanOut(self._carrier, options, self._packer)
            weakref.finalize(self, self._fan_out.close)  # relays do not outlive it, even without shutdown()

    @override
    def set_up(self, arguments: Arguments) -> None:
        self._take_model(arguments, "model", "source_model")
        counts = {name: arguments.count(name) for name in ("num_workers", "num_collectors")}
        roster = self._scheme.roster(arguments)
        if roster is not None:
            workers = roster.read() or ()
            for name, count in counts.items():
                if count is not None and count != len(workers):
                    raise ValueError(
                        f"{name} is {count} but there are {len(workers)} {roster.name}; give one for each worker"
                    )
            self._roster = roster
            if roster.live:
                self._take_in(workers, roster)
            else:
                for index, address in enumerate(workers):
                    self.register_worker(index, address)

    @override
    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        worker_idx = check_worker(worker_idx)
        if self._roster is not None and self._roster.live:
            raise ValueError(f"the workers are those of {self._roster.name}; put this one into that list")
        super().register_worker(worker_idx, pipe_or_context, process)

    def _update_workers(self) -> None:
        """Take in workers that joined or left."""
        roster = self._roster
        if roster is not None and roster.live and (workers := roster.read()) is not None:
            self._take_in(workers, roster)

    def _take_in(self, workers: Sequence[Any], roster: Roster) -> None:
        """These are the workers now. One that stays keeps the transport, and so the request that is under way there."""
        keys = [roster.key(address) for address in workers]
        if keys == [transport.key for transport in self._transports.values()]:
            return
        known = {transport.key: transport for transport in self._transports.values()}
        earlier, self._transports = self._transports, {}
        try:
            for index, (key, address) in enumerate(zip(keys, workers, strict=True)):
                if key in known:
                    self._transports[index] = known[key]
                    continue
                self._register_worker(index, address)
                if index in self._transports:  # a subclass may leave one out
                    self._transports[index].key = key
        except BaseException:
            self._transports = earlier
            raise

    @override
    def _is_dead(self, index: int) -> bool:
        return self._transports[index].reported

    def close(self) -> None:
        """End the relays and their arenas. Idempotent."""
        if self._fan_out is not None:
            self._fan_out.close()
        for transport in self._transports.values():
            transport.close()
        self._carrier.close()
        self._packer.forget()

    @override
    def _chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        self._update_workers()
        return self._reached(super()._chosen(worker_ids))

    @override
    def _post(self, weights: Any, workers: list[int], deadline: float) -> RemoteSend:
        try:
            return self._deliver(weights, workers, deadline)
        except AckTimeout as error:  # a carrier that could not pack them in time does not know the workers
            error.missing = error.missing or list(self._alive(workers))
            raise

    def _alive(self, workers: Iterable[int]) -> dict[int, RemoteTransport]:
        """Those of these workers that no send has named as dead."""
        return {index: self._transports[index] for index in workers if not self._transports[index].reported}

    def _deliver(self, weights: Any, workers: list[int], deadline: float) -> RemoteSend:
        alive = self._alive(workers)
        if workers and not alive:
            raise WorkerDied(
                f"all workers that {self._model_id!r} should go to are dead ({', '.join(map(str, workers))}); nothing "
                "was sent. Start others in their place",
                missing=workers,
            )
        prepared = self.sent_weights(weights)
        sending = RemoteSend(self._carrier.wait)
        if (fan_out := self._fan_out) is not None:
            fan_out.find_locations(sending, alive, self._alive(self._transports), deadline)
            version = max(self._version, fan_out.version(self._model_id)) + 1
            stamp = Stamp(self._packer.session, self._model_id, version)
            whole = prepared
            if self._scheme.partial:
                whole = self._sent_leaves.with_part(private_leaves(prepared))

            def accept() -> None:
                self._version = version
                if self._scheme.partial:
                    self._sent_leaves.accept(whole)

            fan_out.deliver(sending, stamp, prepared, alive, accept, deadline, whole=whole)
            return sending
        packed_weights = self._packer.pack(prepared, self._model_id, self._version + 1)
        payload = self._carrier.payload(packed_weights, deadline) if alive else None
        self._version += 1
        for index, transport in alive.items():
            sending.add(Step(index, transport, partial(transport.post, payload)))
        return sending

    @override
    def _collect(self, posted: RemoteSend, deadline: float) -> None:
        posted.finish(deadline)
        self._sent_leaves.settle(posted.outcome)
        posted.check(f"version {self._version} of {self._model_id!r}", self._version, self._transports)

    @property
    def default_timeout(self) -> float:  # type: ignore[override]
        """Of a call without timeout=, in seconds: the scheme's."""
        return self._scheme.timeout
