"""Weights for actors of Ray that have a method update_policy_weights_(), such as collectors."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from ....engine.strategy import Form
from ....engine.subscriber import Consistency
from ...lookup import Arguments
from ..background import Clerk
from ..fan_out import FanOut, Site
from ..parcel import Parcel
from ..place import Place
from ..relay import Relay, RelayOptions
from ..requests import Answered, Call, Destination
from ..scheme import RemoteScheme, RemoteSender
from ..transport import RemoteTransport
from . import requests

TensorTransport = Literal["object_store", "nixl"]


class RayTransport(RemoteTransport):
    """Reaches one actor through Ray's object store.

    Args:
        remote_collector: the actor; None: every call does nothing.
        tensor_transport: how Ray moves the weights.
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits for ever.

    Raises ImportError when Ray is not installed, ValueError for another tensor_transport.
    """

    def __init__(
        self, remote_collector: Any = None, tensor_transport: TensorTransport = "object_store", *, timeout: float = 60.0
    ) -> None:
        requests.require_ray(type(self).__name__)
        check_tensor_transport(tensor_transport)
        self.actor = remote_collector
        self.tensor_transport = tensor_transport
        super().__init__(timeout)

    def post(self, payload: Any) -> Call:
        """Call the actor with weights in the object store, or with an announcement."""
        if self.actor is None:
            return Answered()
        return requests.RayCall(self._invoke(payload), payload)

    def call_with(self, reference: Any) -> Call:
        """The same for actors that may call their argument otherwise."""
        return requests.RayCall(self.actor.update_policy_weights_.remote(reference), reference)

    def _invoke(self, payload: Any) -> Any:
        return requests.invoke(self.actor, "update_policy_weights_", policy_or_weights=payload)

    @property
    def connected(self) -> bool:
        """As in RemoteTransport."""
        return self.actor is not None

    def _payload(self, parcel: Parcel) -> Any:
        return requests.put(parcel, self.tensor_transport)

    def _wait(self, calls: Collection[Call], seconds: float) -> None:
        requests.wait(calls, seconds)

    def check_connection(self) -> bool:
        """Is Ray running in this process?"""
        return bool(requests.require_ray(type(self).__name__).is_initialized())


def check_tensor_transport(tensor_transport: str) -> None:
    """Raise ValueError for one that Ray does not have."""
    if tensor_transport not in ("object_store", "nixl"):
        raise ValueError(f'tensor_transport is "object_store" or "nixl", not {tensor_transport!r}')


class RayWeightSyncScheme(RemoteScheme):
    """Weights go to actors of Ray: one object in the store for each send, whatever the number of actors.

    Each actor has a method `update_policy_weights_(policy_or_weights)`, which gives what it gets to the receiver's
    apply_weights(): a TensorDict or a dict, or with fan_out="node" an announcement. In an actor with a receiver the
    tensors are views of the object store, not to be written into; in one without they are a copy.

    Args:
        strategy, fan_out, slots, consistency, timeout: as in RemoteScheme. Relays are actors.
        tensor_transport: how Ray moves the weights, "object_store" or "nixl".
    """

    def __init__(
        self,
        strategy: Form = "state_dict",
        *,
        tensor_transport: TensorTransport = "object_store",
        fan_out: Literal["node"] | None = None,
        slots: int = 1,
        consistency: Consistency = "pinned",
        timeout: float = 60.0,
    ) -> None:
        super().__init__(strategy, fan_out=fan_out, slots=slots, consistency=consistency, timeout=timeout)
        check_tensor_transport(tensor_transport)
        self.tensor_transport: TensorTransport = tensor_transport

    def init_on_sender(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Prepare to send the model of this id.

        Args:
            context: gives `.remote_collectors` (actors), and perhaps `.num_workers` or `.num_collectors`. Held weakly.
                Who is in that list at a send gets it: actors may join and leave.
            **kwargs: `remote_collectors`, `num_workers` or `num_collectors`, `source_model` (or `model`) instead, or
                beside it. A list is read again at each send too.

        Raises ValueError for missing or contradictory ones, ImportError without Ray.
        """
        requests.require_ray(type(self).__name__)
        super().init_on_sender(model_id, context, **kwargs)

    def create_transport(self, pipe_or_context: Any) -> RayTransport:
        """The transport to this actor."""
        return RayTransport(pipe_or_context, self.tensor_transport, timeout=self.timeout)

    def create_sender(self) -> RaySender:
        """As in WeightSyncScheme."""
        return RaySender(self)


class ActorSender(RemoteSender):
    """Sends through Ray. Kinds of actors derive from it."""

    _scheme: Any  # has .tensor_transport

    def _payload(self, parcel: Parcel) -> Any:
        return requests.put(parcel, self._scheme.tensor_transport)

    def _wait(self, calls: Collection[Call], seconds: float) -> None:
        requests.wait(calls, seconds)

    def _make_fan_out(self) -> FanOut:
        return RayFanOut(self._relay_options)


class RaySender(ActorSender):
    """Sends to actors that have update_policy_weights_()."""

    _scheme: RayWeightSyncScheme
    _roster: Any = None  # a list of actors that the user keeps
    _has_roster = False

    def set_up(self, arguments: Arguments) -> None:
        """As in RemoteSender."""
        super().set_up(arguments)
        roster = arguments.get("remote_collectors")
        if roster is None:
            raise ValueError("remote_collectors must be given, as remote_collectors= or by a context that has it")
        self._check_count(arguments, len(roster), "remote_collectors")
        self._has_roster = True
        if getattr(arguments.context, "remote_collectors", None) is not roster:
            self._roster = roster
        self._register_all(roster)

    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        """As in WeightSender, where there is no list of actors. Raises ValueError where there is."""
        if self._has_roster:
            raise ValueError("the actors are those of remote_collectors; put this one into that list")
        super().register_worker(worker_idx, pipe_or_context, process)

    def _update_roster(self) -> None:
        roster: Sequence[Any] | None = getattr(self._context, "remote_collectors", None)
        roster = self._roster if roster is None else roster
        if roster is not None:
            self._register_all(roster)

    def _register_all(self, roster: Sequence[Any]) -> None:
        """One transport for each actor, the same one as long as it is in the list."""
        if [transport.actor for transport in self._transports.values()] == list(roster):
            return
        known = {transport.actor: transport for transport in self._transports.values() if transport.connected}
        self._transports = {
            index: known.get(actor) or self._scheme.create_transport(actor) for index, actor in enumerate(roster)
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_roster": None, "_has_roster": False}


class RayRelay(Destination):
    """A relay in an actor of its own, on one node."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def post(self, payload: Any) -> Call:
        """Give it weights in the object store."""
        return requests.RayCall(self.actor.publish.remote(payload), payload)


class RayFanOut(FanOut):
    """Relays are actors, which Ray starts on the node that is asked for."""

    def __init__(self, options: RelayOptions) -> None:
        super().__init__(options)
        self._clerk = Clerk()  # asks Ray
        # At exit what was registered last comes first, and Ray is imported now: it still runs when relays end.
        atexit.register(self.close)

    def home(self) -> Place:
        """As in FanOut."""
        requests.require_running()
        return requests.place_of_caller()

    def locate(self, worker: Destination) -> Call:
        """As in FanOut."""
        assert isinstance(worker, RayTransport)
        if worker.actor is None:
            return Answered(self.home())
        if hasattr(worker.actor, "_actor_id"):
            return requests.FindActor(worker.actor, self._clerk)
        return requests.RayCall(worker.actor.__ray_call__.remote(requests.place_of_caller))  # what stands for one

    def make_relay(self, site: Site, members: Mapping[int, Destination]) -> Destination:
        """As in FanOut."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(site.node, soft=False)}
        return RayRelay(ray.remote(Relay).options(**options).remote(self.options))

    def close(self) -> None:
        """As in FanOut."""
        super().close()
        self._clerk.close()
        atexit.unregister(self.close)

    def close_relay(self, relay: Destination, *, ended: bool) -> None:
        """As in FanOut."""
        import ray

        assert isinstance(relay, RayRelay)
        if ray.is_initialized():
            with contextlib.suppress(Exception):  # it is dead, or Ray is going down
                closed = relay.actor.close.remote()  # a killed one would leave its segment
                if ended:
                    ray.wait([closed], timeout=2.0)
                    ray.kill(relay.actor)
                # Else Ray ends the actor after that, when nobody has its handle any more.
