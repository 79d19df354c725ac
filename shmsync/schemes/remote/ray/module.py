"""Weights for a module that lives in an actor of Ray, such as TorchRL's RayModuleTransform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ....engine.strategy import Form
from ....engine.subscriber import Consistency
from ...lookup import Arguments, find_model
from ..receiver import RemoteReceiver
from ..scheme import RemoteScheme
from . import requests
from .scheme import ActorSender, RayTransport, TensorTransport, check_tensor_transport

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
        tensor_transport, timeout: as in RayTransport.

    Raises ImportError when Ray is not installed, ValueError for another update_method.
    """

    def __init__(
        self,
        actor_ref: Any = None,
        update_method: Form = "tensordict",
        tensor_transport: TensorTransport = "object_store",
        *,
        timeout: float = 60.0,
    ) -> None:
        if update_method not in _METHODS:
            raise ValueError(f"update_method is {' or '.join(map(repr, _METHODS))}, not {update_method!r}")
        super().__init__(actor_ref, tensor_transport, timeout=timeout)
        self.update_method = update_method

    def set_actor(self, actor_ref: Any) -> None:
        """Reach this actor from now on."""
        self.actor = actor_ref

    def _invoke(self, payload: Any) -> Any:
        method, argument = _METHODS[self.update_method]
        return requests.invoke(self.actor, method, **{argument: payload})

    def check_connection(self) -> bool:
        """Is Ray running in this process, and is there an actor?"""
        return super().check_connection() and self.actor is not None


class RayModuleTransformScheme(RemoteScheme):
    """Weights go to modules inside actors of Ray.

    The actor is given (`actor_refs=` or `actors=`), or found in the context by the model id at the first send: it is
    what stands there, or that object's `._actor`.

    Args:
        strategy: the form in which weights travel, and which of the actor's methods gets them.
        tensor_transport, fan_out, slots, consistency, timeout: as in RayWeightSyncScheme. fan_out="node" needs an actor
            that gives what it gets to a receiver's apply_weights(), as TorchRL's does not.
    """

    def __init__(
        self,
        strategy: Form = "tensordict",
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
            context: gives `.actor_refs`, `.actors` or `.remote_collectors`, or the actor by the model id. Held weakly.
            **kwargs: the same names, and `source_model` (or `model`), instead or beside it.

        Raises ValueError when neither actors nor a context are given, ImportError without Ray.
        """
        requests.require_ray(type(self).__name__)
        super().init_on_sender(model_id, context, **kwargs)

    def create_transport(self, pipe_or_context: Any) -> RayActorTransport:
        """The transport to this actor, or to the one that an object has as `._actor`."""
        actor = actor_of(pipe_or_context)
        return RayActorTransport(actor, self.strategy, self.tensor_transport, timeout=self.timeout)

    def create_sender(self) -> RayModuleTransformSender:
        """As in WeightSyncScheme."""
        return RayModuleTransformSender(self)

    def create_receiver(self) -> RayModuleTransformReceiver:
        """As in WeightSyncScheme."""
        return RayModuleTransformReceiver(self)


def actor_of(found: Any) -> Any:
    """The actor that is meant: `._actor`, or the object itself."""
    # An actor handle raises AttributeError for what is no method of its class.
    return getattr(found, "_actor", found)


class RayModuleTransformSender(ActorSender):
    """Sends to the actors of modules."""

    _scheme: RayModuleTransformScheme
    _lazily = True  # the actor is found in the context when it is needed

    def set_up(self, arguments: Arguments) -> None:
        """As in RemoteSender."""
        super().set_up(arguments)
        for name in ("actor_refs", "actors", "remote_collectors"):
            actors: Sequence[Any] | None = arguments.get(name)
            if actors is not None:
                self._check_count(arguments, len(actors), name)
                self._lazily = False
                for index, actor in enumerate(actors):
                    self.register_worker(index, actor)
                return
        if arguments.context is None:
            raise ValueError("actor_refs or actors must be given, or a context that has the actor under the model id")

    def _update_roster(self) -> None:
        if self._lazily and not any(transport.connected for transport in self._transports.values()):
            found = None if self._context is None else find_model(self._context, self._model_id)
            if found is None or actor_of(found) is None:
                why = "is gone" if self._context is None else f"has no actor under {self._model_id!r}"
                raise ValueError(f"the context {why}; give init_on_sender() actors=")
            self.register_worker(0, found)

    def _source(self, weights: Any) -> Any:
        # What the context has under the model id is the actor's wrapper, not weights.
        if weights is None and self._model is not None:
            return self._model
        return super()._source(weights)


class RayModuleTransformReceiver(RemoteReceiver):
    """Applies weights to the module inside the actor."""

    def set_up(self, arguments: Arguments) -> None:
        """As in RemoteReceiver; the model is also looked for as the context's `_actor_module` or `module`."""
        super().set_up(arguments)
        for name in ("_actor_module", "module"):
            module = getattr(arguments.context, name, None)
            if isinstance(self._model_ref, str) and module is not None:
                self.register_model(module)
