"""The carrier of Ray: weights in its object store, relays as actors that it starts where they are needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Literal

from typing_extensions import override

from ....errors import AckTimeout, ProtocolError
from ...link.serial_executor import GRACE, SerialExecutor, Task
from ..location import Location, Site
from ..packed_weights import PackedWeights
from ..relay import Relay, RelayOptions
from ..remote_carrier import Carrier
from ..remote_requests import SLICE, Call, Destination, Gone
from .ray_requests import RayCall, look, require_running

TensorTransport = Literal["object_store", "nixl"]


class ActorRelay(Destination):
    """A relay in a separate actor, on one node."""

    def __init__(self, node: str, options: RelayOptions) -> None:
        self._node = node
        self._options = options
        self.actor: Any = None

    def started(self) -> Any:
        """The actor, started if it was not before. Ray's head has to take part: call it on the executor's thread."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.actor is None:
            there = NodeAffinitySchedulingStrategy(self._node, soft=False)
            self.actor = ray.remote(Relay).options(num_cpus=0, scheduling_strategy=there).remote(self._options)
        return self.actor


class RayCarrier(Carrier):
    """Ray.

    Args:
        tensor_transport: how Ray moves the weights.

    Raises ValueError for another tensor_transport.
    """

    def __init__(self, tensor_transport: TensorTransport = "object_store") -> None:
        check_tensor_transport(tensor_transport)
        self._tensor_transport = tensor_transport
        self._executor = SerialExecutor()  # asks Ray

    @override
    def payload(self, packed_weights: PackedWeights, deadline: float) -> Any:
        """Put the weights into the object store, once for all workers, which see the one copy of their node."""
        require_running()
        # On the executor's thread: the object store is in a process of Ray's, which may be stopped, or full.
        put = self._executor.give(partial(_put, packed_weights, self._tensor_transport))
        if not put.done_by(deadline):
            raise AckTimeout(
                "Ray's object store did not take the weights in time, and nothing was sent; look after the raylet of "
                "this node, or give more time with timeout="
            )
        return put.result()

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
    def home(self) -> Location:
        require_running()
        return location_of_caller()

    @override
    def locate(self, worker: Any) -> Call:
        if hasattr(worker.actor, "_actor_id"):
            return FindActor(worker.actor, self._executor)
        return RayCall(worker.actor.__ray_call__.remote(location_of_caller))  # ask actor wrappers for their node

    @override
    def start_relay(self, site: Site, members: Mapping[int, Any], options: RelayOptions) -> ActorRelay:
        return ActorRelay(site.node, options)

    @override
    def relay_call(self, relay: ActorRelay, payload: Any, options: RelayOptions) -> Call:
        if relay.actor is not None:
            return RayCall(relay.actor.publish.remote(payload), payload)
        return StartedCall(self._executor.give(lambda: RayCall(relay.started().publish.remote(payload), payload)))

    @override
    def close_relay(self, relay: ActorRelay, session: str, *, until: float | None) -> None:
        closed = self._executor.give(partial(_close_relay, relay, until))
        if until is not None and closed.done_by(until + GRACE):
            closed.result()

    @override
    def close(self) -> None:
        self._executor.close()


def _put(packed_weights: PackedWeights, tensor_transport: TensorTransport) -> Any:
    import ray

    if tensor_transport == "object_store":
        # As an array: Ray writes its bytes straight into the store, where a tensor would be pickled first.
        array: Any = packed_weights.buffer.numpy()
        return ray.put(PackedWeights(packed_weights.label, array))
    try:
        # A separate tensor: the other side may read it at any time.
        return ray.put(
            PackedWeights(packed_weights.label, packed_weights.buffer.clone()), _tensor_transport=tensor_transport
        )
    except Exception as error:
        raise ProtocolError(
            f"Ray {ray.__version__} did not take the weights with tensor_transport={tensor_transport!r}: {error}. It "
            "needs a Ray whose put() knows that, and the package nixl in the trainer and in every actor; or use "
            'tensor_transport="object_store". Nothing was sent'
        ) from error


def _close_relay(relay: ActorRelay, until: float | None) -> None:
    """End what it publishes. `until`: the sender ends, and waits until then."""
    import ray

    if relay.actor is None or relay.dead or not ray.is_initialized():
        return
    with contextlib.suppress(Exception):  # it is dead, or Ray is going down
        closed = relay.actor.close.remote()  # a killed one would leave its segment
        if until is not None:
            ray.wait([closed], timeout=max(0.0, until - time.monotonic()))
            ray.kill(relay.actor)  # else Ray ends it, when the last handle is gone


class StartedCall(Call):
    """A call that the executor starts, since Ray's head may have to take part.

    Args:
        starting: gives the call.
    """

    def __init__(self, starting: Task) -> None:
        self._starting = starting
        self._call: Call | None = None

    @override
    def finished(self) -> bool:
        if self._call is None and self._starting.done():
            if self._starting.exception() is not None:
                return True
            self._call = self._starting.result()
        return self._call is not None and self._call.finished()

    @override
    def result(self) -> Any:
        return self._starting.result() if self._call is None else self._call.result()


def check_tensor_transport(tensor_transport: str) -> None:
    """Raise ValueError for one that Ray does not have."""
    if tensor_transport not in ("object_store", "nixl"):
        raise ValueError(f'tensor_transport is "object_store" or "nixl", not {tensor_transport!r}')


def on_node(node: str) -> Location:
    """What is known of a process under Ray: its node."""
    return Location(node, "", 0, 0, 0)


def location_of_caller(_actor: Any = None) -> Location:
    """Where the calling actor, or driver, runs."""
    import ray

    return on_node(ray.get_runtime_context().get_node_id())


class FindActor(Call):
    """Ray's own knowledge of where an actor runs: to ask the actor would be to wait for what it does."""

    def __init__(self, actor: Any, executor: SerialExecutor) -> None:
        self._executor = executor
        self._id = actor._actor_id.hex()
        self._answer: Location | str | None = None
        self._asked: Task | None = None

    @override
    def finished(self) -> bool:
        if self._answer is None:
            from ray._private import state

            if self._asked is None:  # on a thread: Ray's head may be slow, and this request has no time-out
                self._asked = self._executor.give(partial(state.actors, self._id))
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
