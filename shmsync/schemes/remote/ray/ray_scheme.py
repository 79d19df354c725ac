"""Weights for actors of Ray: those that have a method update_policy_weights_(), and those that hold a module."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from typing_extensions import override

from ....engine.source.dtypes import Dtypes
from ....engine.subscriber import Consistency
from ...context_args import Arguments, find_object
from ...strategy import Form
from ..remote_receiver import RemoteReceiver
from ..remote_requests import Call
from ..remote_scheme import RemoteScheme, RemoteSender, Roster
from ..remote_transport import RemoteTransport
from .ray_carrier import RayCarrier, TensorTransport, check_tensor_transport
from .ray_requests import RayCall, invoke, require_ray

_METHODS = {
    "tensordict": ("_update_weights_tensordict", "params"),
    "state_dict": ("_update_weights_state_dict", "state_dict"),
}  # of RayModuleTransform's actors


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
        super().__init__(RayCarrier(tensor_transport), timeout)

    @property
    @override
    def connected(self) -> bool:
        return self.actor is not None

    @override
    def start_call(self, payload: Any) -> Call:
        method, argument = self._method
        return RayCall(invoke(self.actor, method, argument, payload), payload)

    @property
    def _method(self) -> tuple[str, str]:
        """Of the actor, and the name of its parameter."""
        return "update_policy_weights_", "policy_or_weights"

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
        check_tensor_transport(tensor_transport)
        self.tensor_transport: TensorTransport = tensor_transport

    @override
    def create_carrier(self) -> RayCarrier:
        require_ray(type(self).__name__)
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


class RayActorTransport(RayTransport):
    """Reaches one actor that has the methods of RayModuleTransform's.

    Args:
        actor_ref: the actor; None: every call does nothing, until set_actor().
        update_method: "tensordict": `_update_weights_tensordict(params)`; "state_dict": `_update_weights_state_dict(
            state_dict)`.
        tensor_transport: see RayTransport.
        timeout: see RayTransport.

    Raises ImportError when Ray is not installed, ValueError for another update_method.
    """

    def __init__(
        self,
        actor_ref: Any = None,
        update_method: Form = "tensordict",
        tensor_transport: TensorTransport = "object_store",
        *,
        timeout: float | None = 60.0,
    ) -> None:
        if update_method not in _METHODS:
            raise ValueError(f"update_method is {' or '.join(map(repr, _METHODS))}, not {update_method!r}")
        super().__init__(actor_ref, tensor_transport, timeout=timeout)
        self.update_method = update_method

    def set_actor(self, actor_ref: Any) -> None:
        """Reach this actor from now on."""
        self.actor = actor_ref

    @property
    @override
    def _method(self) -> tuple[str, str]:
        return _METHODS[self.update_method]

    @override
    def check_connection(self) -> bool:
        """Is Ray running in this process, and is there an actor?"""
        return super().check_connection() and self.actor is not None


class RayModuleTransformScheme(ActorScheme):
    """Weights go to modules inside actors of Ray.

    The actor is given (`actor_refs=` or `actors=`), or found in the context by the model id at the first send: it is
    what stands there, or that object's `._actor`.

    Args:
        strategy: the form in which weights travel, and which of the actor's methods gets them.
        tensor_transport: see RayWeightSyncScheme.
        fan_out: see RayWeightSyncScheme. "node" needs an actor that gives what it gets to a receiver's apply_weights();
            TorchRL's does not.
        slots: see RayWeightSyncScheme.
        consistency: see RayWeightSyncScheme.
        timeout: see RayWeightSyncScheme.
        partial: see RayWeightSyncScheme.
        dtype: see RayWeightSyncScheme.

    init_on_sender() takes `actor_refs`, `actors` or `remote_collectors`, and `source_model` (or `model`); each as an
    argument or by the context, which is held weakly. It raises ValueError when neither actors nor a context are given,
    ImportError without Ray.
    """

    sender_takes = ActorScheme.sender_takes | {"actor_refs", "actors", "remote_collectors"}

    def __init__(
        self,
        strategy: Form = "tensordict",
        *,
        tensor_transport: TensorTransport = "object_store",
        fan_out: Literal["node"] | None = None,
        slots: int = 1,
        consistency: Consistency = "pinned",
        timeout: float | None = 60.0,
        partial: bool = False,
        dtype: Dtypes = None,
    ) -> None:
        super().__init__(
            strategy,
            tensor_transport=tensor_transport,
            fan_out=fan_out,
            slots=slots,
            consistency=consistency,
            timeout=timeout,
            partial=partial,
            dtype=dtype,
        )

    @override
    def create_transport(self, pipe_or_context: Any) -> RayActorTransport:
        """The transport to this actor, or to the one that an object has as `._actor`."""
        return RayActorTransport(actor_of(pipe_or_context), self.strategy, self.tensor_transport, timeout=self.timeout)

    @override
    def roster(self, arguments: Arguments) -> Roster | None:
        for name in ("actor_refs", "actors", "remote_collectors"):
            actors = arguments.get(name)
            if actors is not None:
                return Roster(partial(list, actors), name, live=False)
        if arguments.context is None:
            raise ValueError("actor_refs or actors must be given, or a context that has the actor under the model id")
        return None

    @override
    def create_sender(self) -> RayModuleTransformSender:
        return RayModuleTransformSender(self)

    @override
    def create_receiver(self) -> RayModuleTransformReceiver:
        return RayModuleTransformReceiver(self)


def actor_of(found: Any) -> Any:
    """The actor that is meant: `._actor`, or the object itself."""
    # An actor handle raises AttributeError for what is no method of its class.
    return getattr(found, "_actor", found)


class RayModuleTransformSender(RemoteSender):
    """Sends to the actors of modules. With none given, the actor is looked for in the context when it is needed."""

    @override
    def _update_workers(self) -> None:
        if self._roster is None and not any(transport.connected for transport in self._transports.values()):
            found = None if self._context is None else find_object(self._context, self._model_id)
            if found is None or actor_of(found) is None:
                why = "is gone" if self._context is None else f"has no actor under {self._model_id!r}"
                raise ValueError(f"the context {why}; give init_on_sender() actors=")
            self.register_worker(0, found)

    @override
    def _source(self, weights: Any) -> Any:
        # What the context has under the model id is the actor's wrapper, not weights.
        model = self.given_model if self.given_model is not None else self.context_model
        if weights is None and model is not None:
            return model
        return super()._source(weights)


class RayModuleTransformReceiver(RemoteReceiver):
    """Applies weights to the module inside the actor."""

    @override
    def set_up(self, arguments: Arguments) -> None:
        """What init_on_worker() got. The model is also looked for as the context's `_actor_module` or `module`."""
        super().set_up(arguments)
        for name in ("_actor_module", "module"):
            module = getattr(arguments.context, name, None)
            if isinstance(self._model_ref, str) and module is not None:
                self._register_model(module)
