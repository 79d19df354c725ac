"""The sender of a scheme whose workers may be on other machines, and what those schemes have in common."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal

from ...engine.strategy import Form
from ...engine.subscriber import Consistency
from ...engine.timing import check_timeout, deadline_after
from ...errors import WorkerDied
from ..api import WeightSender, WeightSyncScheme
from ..lookup import Arguments
from .fan_out import FanOut, check_whole_nodes, find_places, sites_of
from .parcel import Packer, Parcel, Stamp
from .receiver import RemoteReceiver
from .relay import RelayOptions
from .requests import Call, Delivery

_READERS = 256  # for which an arena of a node has rows twice over; they are 128 bytes each


class RemoteScheme(WeightSyncScheme):
    """What the schemes for several machines have in common.

    Args:
        strategy: the form in which weights travel, "state_dict" or "tensordict".
        fan_out: None: each worker gets the weights by itself, and copies them into its model. "node": one copy goes to
            each node; a relay publishes it into an arena there, to which all of the node's workers attach.
        slots, consistency: of those arenas and of their subscribers; see Publisher and Subscriber.
        timeout: default of a send, in seconds; math.inf waits for ever.
    """

    def __init__(
        self,
        strategy: Form = "state_dict",
        *,
        fan_out: Literal["node"] | None = None,
        slots: int = 1,
        consistency: Consistency = "pinned",
        timeout: float = 60.0,
    ) -> None:
        super().__init__(strategy)
        if fan_out not in (None, "node"):
            raise ValueError(f'fan_out is None or "node", not {fan_out!r}')
        self.fan_out = fan_out
        self.slots = slots
        self.consistency: Consistency = consistency
        self.timeout = check_timeout(timeout)

    def create_receiver(self) -> RemoteReceiver:
        """As in WeightSyncScheme."""
        return RemoteReceiver(self)

    def shutdown(self) -> None:
        """As in WeightSyncScheme."""
        if isinstance(self._sender, RemoteSender):
            self._sender.close()
        if isinstance(self._receiver, RemoteReceiver):
            self._receiver.close()


class RemoteSender(WeightSender):
    """Sends to all workers at once, and waits for all of them with one deadline.

    send() also takes in who joined and who left since the last one, where the scheme can see that.
    """

    _scheme: RemoteScheme
    _piece_bytes: int | None = None  # see Packer

    def __init__(self, scheme: RemoteScheme) -> None:
        super().__init__(scheme)
        self._start()

    def _start(self) -> None:
        self._packer = Packer(self._piece_bytes)
        self._fan_out: FanOut | None = None
        if self._scheme.fan_out == "node":
            self._fan_out = self._make_fan_out()
            weakref.finalize(self, self._fan_out.close)  # relays do not outlive it, whoever forgets shutdown()

    def set_up(self, arguments: Arguments) -> None:
        """What init_on_sender() got. For the scheme."""
        self._model = next((m for name in ("model", "source_model") if (m := arguments.get(name)) is not None), None)

    def _check_count(self, arguments: Arguments, count: int, what: str) -> None:
        """Refuse a number of workers that contradicts the workers."""
        for name in ("num_workers", "num_collectors"):
            given = arguments.get(name)
            if isinstance(given, int) and given != count:
                raise ValueError(f"{name} is {given} but there are {count} {what}; give one for each worker")

    def is_dead(self, worker_idx: int) -> bool:
        """As in WeightSender."""
        return bool(self._transports[worker_idx].reported)

    @property
    def _relay_options(self) -> RelayOptions:
        return RelayOptions(self._scheme.slots, _READERS, self._scheme.timeout)

    def close(self) -> None:
        """End the relays and their arenas. Idempotent."""
        if self._fan_out is not None:
            self._fan_out.close()

    # What the kinds of transports do differently.

    def _update_roster(self) -> None:
        """Take in who joined and who left."""

    def _payload(self, parcel: Parcel) -> Any:
        """What is posted to each destination."""
        return parcel

    def _wait(self, calls: Collection[Call], seconds: float) -> None:
        """Until one of these calls is finished, but no longer than that."""
        raise NotImplementedError

    def _make_fan_out(self) -> FanOut:
        """Relays of this kind."""
        raise NotImplementedError

    # The send.

    def _chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        self._update_roster()
        return super()._chosen(worker_ids)

    def _post(self, weights: Any, workers: list[int], deadline: float) -> Delivery:
        alive = {index: self._transports[index] for index in workers if not self._transports[index].reported}
        if workers and not alive:
            raise WorkerDied(
                f"all workers that {self._model_id!r} should go to are dead ({', '.join(map(str, workers))}); nothing "
                "was sent. Start others in their place",
                missing=workers,
            )
        prepared = self._prepared(weights)
        delivery = Delivery(self._wait)
        if self._fan_out is not None:
            self._post_by_node(self._fan_out, delivery, prepared, alive, deadline)
            return delivery
        parcel = self._packer.pack(prepared, self._model_id, self._version + 1)
        payload = self._payload(parcel) if alive else None
        self._version += 1
        for index, transport in alive.items():
            delivery.ask(index, transport, partial(transport.post, payload))
        return delivery

    def _post_by_node(
        self, fan_out: FanOut, delivery: Delivery, weights: Any, workers: dict[int, Any], deadline: float
    ) -> None:
        everybody = {index: each for index, each in self._transports.items() if not each.reported}
        find_places(fan_out, delivery, workers, deadline)
        if workers.keys() != everybody.keys():
            find_places(fan_out, Delivery(self._wait), everybody, deadline)
            check_whole_nodes(workers, everybody)
        if all(each.place is not None for each in everybody.values()):
            fan_out.retire(sites_of(everybody))
        version = max(self._version, fan_out.version(self._model_id)) + 1
        stamp = Stamp(self._packer.session, self._model_id, version)

        def accept() -> None:
            self._version = stamp.version

        sites = sites_of(workers)
        fan_out.deliver(delivery, self._packer, self._payload, stamp, weights, sites, accept, deadline)

    def _collect(self, workers: list[int], posted: Delivery, deadline: float) -> None:
        posted.finish(deadline)
        posted.check(f"version {self._version} of {self._model_id!r}", self._version, self._transports)

    def _deadline(self, timeout: float | None) -> float:
        return deadline_after(timeout, self._scheme.timeout)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_packer")
        state.pop("_fan_out")
        return {**state, "_version": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
