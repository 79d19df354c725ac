"""Weights for a module that lives in an actor of Ray, such as TorchRL's RayModuleTransform."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from typing_extensions import override

from ....engine.source.dtypes import Dtypes
from ....engine.source.strategy import Form
from ....engine.subscriber import Consistency
from ...context_args import Arguments, find_object
from ..remote_receiver import RemoteReceiver
from ..remote_scheme import RemoteSender, Roster
from .ray_carrier import TensorTransport
from .ray_requests import invoke
from .ray_scheme import ActorScheme, RayTransport

_METHODS = {
    "tensordict": ("_update_weights_tensordict", "params"),
    "state_dict": ("_update_weights_state_dict", "state_dict"),
}


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
        self.forget_node()

    @override
    def _invoke(self, payload: Any) -> Any:
        method, argument = _METHODS[self.update_method]
        return invoke(self.actor, method, **{argument: payload})

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
        checksum: see RayWeightSyncScheme.

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
        checksum: bool = False,
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
            checksum=checksum,
        )

    @override
    def create_transport(self, pipe_or_context: Any) -> RayActorTransport:
        """The transport to this actor, or to the one that an object has as `._actor`."""
        actor = actor_of(pipe_or_context)
        return RayActorTransport(actor, self.strategy, self.tensor_transport, timeout=self.timeout)

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

    def __init__(self, scheme: RayModuleTransformScheme) -> None:
        super().__init__(scheme, consistency=scheme.consistency, timeout=scheme.timeout)

    @override
    def set_up(self, arguments: Arguments) -> None:
        """What init_on_worker() got. The model is also looked for as the context's `_actor_module` or `module`."""
        super().set_up(arguments)
        for name in ("_actor_module", "module"):
            module = getattr(arguments.context, name, None)
            if isinstance(self._model_ref, str) and module is not None:
                self._register_model(module)
