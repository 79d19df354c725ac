"""Weights for actors of Ray that have a method update_policy_weights_(), such as collectors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

from typing_extensions import override

from ....engine.source.dtypes import Dtypes
from ....engine.source.strategy import Form
from ....engine.subscriber import Consistency
from ...context_args import Arguments
from ..delivery import Delivery
from ..remote_requests import Call, Gone
from ..remote_scheme import RemoteScheme, Roster
from ..remote_transport import RemoteTransport
from ..weight_client import fetched
from .ray_carrier import RayCarrier, TensorTransport, check_tensor_transport
from .ray_requests import RayCall, invoke, require_ray


class RayTransport(RemoteTransport):
    """Reaches one actor through Ray's object store.

    Args:
        remote_collector: the actor; None: every call does nothing.
        tensor_transport: how Ray moves the weights.
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits without limit.

    Raises ImportError when Ray is not installed, ValueError for another tensor_transport.
    """

    def __init__(
        self,
        remote_collector: Any = None,
        tensor_transport: TensorTransport = "object_store",
        *,
        timeout: float | None = 60.0,
    ) -> None:
        require_ray(type(self).__name__)
        self.actor = remote_collector
        self.tensor_transport = tensor_transport
        self._ray = RayCarrier(tensor_transport)
        self._found: Call | None = None
        super().__init__(self._ray, timeout)

    @property
    @override
    def connected(self) -> bool:
        return self.actor is not None

    @override
    def start_call(self, payload: Any) -> Call:
        if isinstance(payload, Delivery):
            return self.start_delivery(payload)
        return RayCall(self._invoke(payload), payload)

    def start_delivery(self, delivery: Delivery, packed: Callable[[Any], Any] = fetched) -> Call:
        """Send what `packed` makes of the delivery."""

        def start(content: Any) -> Call:
            message = packed(content)
            return RayCall(self._invoke(message), message)

        return delivery.own(start) if delivery.in_a_crowd(id(self), self._node()) else delivery.start(self, start)

    def forget_node(self) -> None:
        """Of another actor it is not known on which node it is."""
        self._found = None

    def _node(self) -> str | None:
        """Of Ray, on which the actor runs, once that is known."""
        if self._found is None and hasattr(self.actor, "_actor_id"):
            self._found = self._ray.locate(self)
        if self._found is None or not self._found.finished():
            return None
        with contextlib.suppress(Gone):
            return str(self._found.result().node)
        return None

    def _invoke(self, payload: Any) -> Any:
        return invoke(self.actor, "update_policy_weights_", policy_or_weights=payload)

    @override
    def check_connection(self) -> bool:
        """Is Ray running in this process?"""
        return bool(require_ray(type(self).__name__).is_initialized())


class ActorScheme(RemoteScheme):
    """What the schemes for actors of Ray have in common."""

    def __init__(
        self,
        strategy: Form = "state_dict",
        *,
        tensor_transport: TensorTransport = "object_store",
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
        check_tensor_transport(tensor_transport)
        self.tensor_transport: TensorTransport = tensor_transport

    @override
    def init_on_sender(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        require_ray(type(self).__name__)
        super().init_on_sender(model_id, context, **kwargs)

    @override
    def create_carrier(self) -> RayCarrier:
        return RayCarrier(self.tensor_transport)


class RayWeightSyncScheme(ActorScheme):
    """Weights go to actors of Ray: one object in the store for each send, whatever the number of actors.

    Each actor has a method `update_policy_weights_(policy_or_weights)`, which gives what it gets to the receiver's
    apply_weights(): a TensorDict or a dict, or with fan_out="node" an announcement. In an actor with a receiver the
    tensors are views of the object store, not to be written into; in one without they are a copy.

    Args:
        strategy: see RemoteScheme.
        fan_out: see RemoteScheme. Relays are actors.
        slots: see RemoteScheme.
        consistency: see RemoteScheme.
        timeout: see RemoteScheme.
        partial: see RemoteScheme.
        dtype: see RemoteScheme.
        checksum: see RemoteScheme.
        tensor_transport: how Ray moves the weights, "object_store" or "nixl".

    init_on_sender() takes `remote_collectors` (a list of actors, read again at each send: actors may join and leave),
    and perhaps `num_workers` or `num_collectors`, `source_model` (or `model`); each as an argument or by the context,
    which is held weakly. It raises ValueError for missing or contradictory ones, ImportError without Ray.
    """

    sender_takes = RemoteScheme.sender_takes | {"remote_collectors"}

    @override
    def create_transport(self, pipe_or_context: Any) -> RayTransport:
        """The transport to this actor."""
        return RayTransport(pipe_or_context, self.tensor_transport, timeout=self.timeout)

    @override
    def roster(self, arguments: Arguments) -> Roster:
        arguments.needed("remote_collectors")
        return Roster(arguments.reader("remote_collectors"), "remote_collectors", live=True)
