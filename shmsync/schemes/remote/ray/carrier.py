"""The carrier of Ray: weights in its object store, relays as actors that it starts where they are needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Literal

from typing_extensions import override

from ..background import Clerk, Task
from ..carrier import Carrier
from ..parcel import Parcel
from ..place import Place, Site
from ..relay import Relay, RelayOptions
from ..requests import SLICE, Call, Destination, Gone
from .requests import RayCall, look, require_ray, require_running

TensorTransport = Literal["object_store", "nixl"]


class ActorRelay(Destination):
    """A relay in an actor of its own, on one node."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor


class RayCarrier(Carrier):
    """Ray.

    Args:
        tensor_transport: how Ray moves the weights.

    Raises ImportError when Ray is not installed, ValueError for another tensor_transport.
    """

    def __init__(self, tensor_transport: TensorTransport = "object_store") -> None:
        require_ray("a scheme for actors of Ray")
        check_tensor_transport(tensor_transport)
        self._tensor_transport = tensor_transport
        self._clerk = Clerk()  # asks Ray

    @override
    def payload(self, parcel: Parcel) -> Any:
        """Into the object store, once for all who get it. Each process that does sees the one copy of its node."""
        import ray

        require_running()
        if self._tensor_transport == "object_store":
            # As an array: Ray writes its bytes straight into the store, where a tensor would be pickled first.
            return ray.put(Parcel(parcel.label, [parcel.buffer.numpy()]))
        # A tensor of its own: the other side may read it at any time.
        return ray.put(Parcel(parcel.label, [parcel.buffer.clone()]), _tensor_transport=self._tensor_transport)

    @override
    def wait(self, calls: Collection[Call], seconds: float) -> None:
        unfinished = [call for call in calls if isinstance(call, RayCall) and not call.known_finished]
        others = [call for call in calls if not isinstance(call, RayCall)]
        if any(call.finished() for call in others) or len(unfinished) + len(others) < len(calls):
            return
        if others:
            seconds = min(seconds, 0.01)
        if unfinished:
            look(unfinished, min(seconds, SLICE))
        else:
            time.sleep(seconds)

    @override
    def home(self) -> Place:
        require_running()
        return place_of_caller()

    @override
    def locate(self, worker: Any) -> Call:
        if hasattr(worker.actor, "_actor_id"):
            return FindActor(worker.actor, self._clerk)
        return RayCall(worker.actor.__ray_call__.remote(place_of_caller))  # ask actor wrappers for their node

    @override
    def start_relay(self, site: Site, members: Mapping[int, Any], options: RelayOptions) -> ActorRelay:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(site.node, soft=False)
        return ActorRelay(ray.remote(Relay).options(num_cpus=0, scheduling_strategy=there).remote(options))

    @override
    def relay_call(self, relay: ActorRelay, payload: Any, options: RelayOptions) -> Call:
        return RayCall(relay.actor.publish.remote(payload), payload)

    @override
    def close_relay(self, relay: ActorRelay, session: str, *, ended: bool) -> None:
        import ray

        if ray.is_initialized():
            with contextlib.suppress(Exception):  # it is dead, or Ray is going down
                closed = relay.actor.close.remote()  # a killed one would leave its segment
                if ended:
                    ray.wait([closed], timeout=2.0)
                    ray.kill(relay.actor)
                # Else Ray ends the actor after that, when nobody has its handle any more.

    @override
    def close(self) -> None:
        self._clerk.close()


def check_tensor_transport(tensor_transport: str) -> None:
    """Raise ValueError for one that Ray does not have."""
    if tensor_transport not in ("object_store", "nixl"):
        raise ValueError(f'tensor_transport is "object_store" or "nixl", not {tensor_transport!r}')


def on_node(node: str) -> Place:
    """What is known of a process under Ray: its node."""
    return Place(node, "", 0, 0, 0)


def place_of_caller(_actor: Any = None) -> Place:
    """Where the calling actor, or driver, runs."""
    import ray

    return on_node(ray.get_runtime_context().get_node_id())


class FindActor(Call):
    """Ray's own knowledge of where an actor runs: to ask the actor would be to wait for what it does."""

    def __init__(self, actor: Any, clerk: Clerk) -> None:
        self._clerk = clerk
        self._id = actor._actor_id.hex()
        self._answer: Place | str | None = None
        self._asked: Task | None = None

    @override
    def finished(self) -> bool:
        if self._answer is None:
            from ray._private import state

            if self._asked is None:  # on a thread: Ray's head may be slow, and this request has no time-out
                self._asked = self._clerk.give(partial(state.actors, self._id))
                self._asked.done_by(time.monotonic() + 0.01)
            if not self._asked.done():
                return False
            asked, self._asked = self._asked, None
            found = asked.result() or {}
            if found.get("State") == "ALIVE":
                self._answer = on_node(found["Address"]["NodeID"])
            elif found.get("State") == "DEAD":
                self._answer = f"Ray: the actor is dead (pid {found.get('Pid')})"
        return self._answer is not None

    @override
    def result(self) -> Any:
        if isinstance(self._answer, str):
            raise Gone(self._answer)
        return self._answer
