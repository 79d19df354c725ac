"""Weights for actors of Ray: those that have a method update_policy_weights_(), and those that hold a module.

A send is one ray.put() of one flat buffer, then one call of each actor with the reference, then one wait for all
calls. Ray brings the object to each node once; the actors of a node read the one copy in its object store. The call's
return is the answer. What Ray reports of a dead actor is raised as WorkerDied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy
import torch
from typing_extensions import override

from ...engine.outcome import Failure
from ...errors import ProtocolError
from ...memory.manifest import Manifest
from ...memory.torch_modes import run_plainly
from ..context import Arguments, find_object
from ..strategy import Form
from .base import Dead, Failed, RemoteScheme, RemoteSender, RemoteTransport
from .nodes import NodeFanOut
from .packing import Label, PackedWeights, unpack
from .receiver import RemoteReceiver, receivers

TensorTransport = Literal["object_store", "nixl"]


def require_ray(user: object) -> Any:
    """The ray package. Raises ImportError, naming the extra, when it is not installed."""
    try:
        import ray
    except ImportError as error:
        name = type(user).__name__
        raise ImportError(f"{name} needs Ray, which is not installed; pip install 'shmsync[ray]'") from error
    return ray


def check_tensor_transport(tensor_transport: TensorTransport) -> TensorTransport:
    """Raise ValueError for one that Ray does not have."""
    if tensor_transport not in ("object_store", "nixl"):
        raise ValueError(f'tensor_transport is "object_store" or "nixl", not {tensor_transport!r}')
    return tensor_transport


# ---- actors with a method update_policy_weights_()


class RayWeightSyncScheme(RemoteScheme):
    """Weights go to actors of Ray: one object in the store for each send, whatever the number of actors.

    Each actor has a method `update_policy_weights_(policy_or_weights)`, which gives what it gets to the receiver's
    apply_weights(): a TensorDict or a dict, or with fan_out="node" news of an arena. In an actor with a receiver the
    tensors are views of the object store, not to be written into; in one without they are a copy.

    Args:
        strategy: see RemoteScheme, and so for the others.
        tensor_transport: how Ray moves the weights, "object_store" or "nixl".

    init_on_sender() takes `remote_collectors` (a list of actors), and perhaps `num_workers` or `num_collectors`,
    `source_model` (or `model`); each as an argument or by the context, which is held weakly. It raises ValueError for
    missing or contradictory ones, ImportError without Ray.
    """

    make_fan_out = NodeFanOut

    def __init__(
        self, strategy: Form = "state_dict", *, tensor_transport: TensorTransport = "object_store", **options: Any
    ) -> None:
        super().__init__(strategy, **options)
        self.tensor_transport = check_tensor_transport(tensor_transport)

    @override
    def create_transport(self, pipe_or_context: Any = None) -> RayTransport:
        """The transport to this actor."""
        return RayTransport(pipe_or_context, self.tensor_transport, timeout=self.timeout)

    @override
    def workers(self, arguments: Arguments) -> Sequence[Any]:
        require_ray(self)
        return list(arguments.needed("remote_collectors"))


class RayTransport(RemoteTransport):
    """Reaches one actor through Ray's object store.

    Args:
        remote_collector: the actor; None: every call does nothing.
        tensor_transport: how Ray moves the weights.
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits without limit, None is 60.

    Raises ImportError when Ray is not installed, ValueError for another tensor_transport.
    """

    method = "update_policy_weights_", "policy_or_weights"  # of the actor, and its parameter

    def __init__(
        self,
        remote_collector: Any = None,
        tensor_transport: TensorTransport = "object_store",
        *,
        timeout: float | None = None,
    ) -> None:
        self._ray = require_ray(self)
        super().__init__(timeout)
        self.actor = remote_collector
        self.tensor_transport = check_tensor_transport(tensor_transport)

    @property
    @override
    def connected(self) -> bool:
        return self.actor is not None

    @override
    def check_connection(self) -> bool:
        """Is Ray running in this process?"""
        return bool(self._ray.is_initialized())

    @override
    def wrap(self, packed: PackedWeights) -> Any:
        """A reference to the weights in the object store."""
        if not self._ray.is_initialized():  # ray.put() would start a Ray on this machine
            raise ProtocolError("Ray is not running in this process; call ray.init() before you send")
        if self.tensor_transport == "object_store":
            return self._ray.put(StoredWeights(packed))
        try:
            # A separate tensor: the other side may read it at any time.
            content = PackedWeights(packed.label, packed.manifest, packed.buffer.clone())
            return self._ray.put(content, _tensor_transport=self.tensor_transport)
        except Exception as error:
            raise ProtocolError(
                f"Ray {self._ray.__version__} did not take the weights with tensor_transport={self.tensor_transport!r}:"
                f' {error}. It needs the package nixl in the trainer and in every actor; or use "object_store". Nothing'
                " was sent"
            ) from error

    @override
    def start(self, content: Any) -> Any:
        name, argument = self.method
        method = getattr(self.actor, name, None)
        if method is None:
            raise Failed(f"its class has no method {name}({argument}), which gets the weights; add it to the actor")
        return method.remote(**{argument: content}).future()

    def call(self, function: Callable[..., Any], content: Any = None, *args: Any) -> Any:
        """Call function(content, *args) in the actor's process; the answer is what that returns."""
        return self.actor.__ray_call__.remote(_call, function, content, *args).future()

    @override
    def answer(self, request: Any) -> Any:
        from ray import exceptions

        gone = (
            exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError,
            # It never started.
            exceptions.ActorUnschedulableError, exceptions.RuntimeEnvSetupError, exceptions.ActorPlacementGroupRemoved,
        )  # fmt: skip
        try:
            return request.result()
        except gone as error:
            final = not isinstance(error, exceptions.ActorUnavailableError)
            raise Dead(f"Ray: {error}", final=final) from error
        except exceptions.RayError as error:  # the actor raised, an object is lost, ...
            cause = getattr(error, "cause", None)
            failure = Failure.of(cause if isinstance(cause, BaseException) else error)
            raise Failed(failure._replace(trace=str(error))) from error


def _call(actor: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class StoredWeights:
    """Packed weights for Ray's object store. Unpickle as the weights, with their label.

    As an array: Ray writes its bytes into the store, where it would pickle a tensor. All actors of a node map them, so
    views go only to models whose receiver is in the process: it copies them. Others get a private copy.
    """

    def __init__(self, packed: PackedWeights) -> None:
        self._packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        packed = self._packed
        return _fetched, (packed.label, packed.manifest, packed.buffer.numpy())


@run_plainly
def _fetched(label: Label, manifest: Manifest, stored: numpy.ndarray) -> Any:
    if not stored.nbytes or all(receiver.model_id != label.model_id for receiver in list(receivers)):
        return unpack(label, manifest, torch.from_numpy(stored.copy()))
    # from_numpy() would warn each time that it is read-only.
    memory = (ctypes.c_uint8 * stored.nbytes).from_address(stored.ctypes.data)
    memory.array = stored  # type: ignore[attr-defined]  # keeps it
    return unpack(label, manifest, torch.frombuffer(memory, dtype=torch.uint8))


# ---- actors that hold a module, such as RayModuleTransform's


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Weights go to modules inside actors of Ray.

    The actor is given (`actor_refs=` or `actors=`), or found in the context by the model id at the first send: it is
    what stands there, or that object's `._actor`.

    Args:
        strategy: the form in which weights travel, and which of the actor's methods gets them.
        **options: those of RayWeightSyncScheme. fan_out="node" needs an actor that gives what it gets to a receiver's
            apply_weights(); TorchRL's does not.

    init_on_sender() takes `actor_refs`, `actors` or `remote_collectors`, and `source_model` (or `model`); each as an
    argument or by the context, which is held weakly. It raises ValueError when neither actors nor a context are given,
    ImportError without Ray.
    """

    def __init__(self, strategy: Form = "tensordict", **options: Any) -> None:
        super().__init__(strategy, **options)

    @override
    def create_transport(self, pipe_or_context: Any = None) -> RayActorTransport:
        """The transport to this actor, or to the one that an object has as `._actor`."""
        return RayActorTransport(actor_of(pipe_or_context), self.strategy, self.tensor_transport, timeout=self.timeout)

    @override
    def create_sender(self) -> RayModuleTransformSender:
        return RayModuleTransformSender(self)

    @override
    def create_receiver(self) -> RayModuleTransformReceiver:
        return RayModuleTransformReceiver(self)

    @override
    def workers(self, arguments: Arguments) -> Sequence[Any]:
        require_ray(self)
        for name in ("actor_refs", "actors", "remote_collectors"):
            if (actors := arguments.get(name)) is not None:
                return list(actors)
        if arguments.context is None:
            raise ValueError("actor_refs or actors must be given, or a context that has the actor under the model id")
        return ()


def actor_of(found: Any) -> Any:
    """The actor that is meant: `._actor`, or the object itself."""
    # An actor handle raises AttributeError for what is no method of its class.
    return getattr(found, "_actor", found)


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
        timeout: float | None = None,
    ) -> None:
        if update_method not in ("tensordict", "state_dict"):
            raise ValueError(f"update_method is 'tensordict' or 'state_dict', not {update_method!r}")
        super().__init__(actor_ref, tensor_transport, timeout=timeout)
        self.update_method = update_method
        argument = "params" if update_method == "tensordict" else "state_dict"
        self.method = f"_update_weights_{update_method}", argument

    def set_actor(self, actor_ref: Any) -> None:
        """Reach this actor from now on."""
        self.actor, self.request, self.reported = actor_ref, None, False

    @override
    def check_connection(self) -> bool:
        """Is Ray running in this process, and is there an actor?"""
        return super().check_connection() and self.connected


class RayModuleTransformSender(RemoteSender):
    """Sends to the actors of modules. With none given, the actor is looked for in the context when it is needed."""

    @override
    def _chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        if not any(transport.connected for transport in self._links.values()):
            found = None if self._context is None else find_object(self._context, self._model_id)
            if found is None or actor_of(found) is None:
                why = "is gone" if self._context is None else f"has no actor under {self._model_id!r}"
                raise ValueError(f"the context {why}; give init_on_sender() actors=")
            self.register_worker(0, found)
        return super()._chosen(worker_ids)


class RayModuleTransformReceiver(RemoteReceiver):
    """Applies weights to the module inside the actor."""

    @override
    def set_up(self, arguments: Arguments) -> None:
        """What init_on_worker() got. The model is also looked for as the context's `module`."""
        super().set_up(arguments)
        module = getattr(arguments.context, "module", None)
        if isinstance(self._model_ref, str) and module is not None:
            self._register_model(module)
