"""First weights for each worker, out of the many forms in which TorchRL gives them to a scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.weight_update.utils import _resolve_model

from ....schemes.devices import device_of_arena
from ....schemes.strategy import WeightStrategy
from .own_weights import tensors_of


class First(NamedTuple):
    """What the workers start with."""

    sources: dict[int, Any]  # by worker: a module or a TensorDict; workers with the same object share weights
    devices: Mapping[int, Any] = MappingProxyType({})  # of each worker's policy, where it is known
    apart: bool = False  # each worker has its own weights
    mapped: Callable[[], dict[int, Any]] | None = None  # makes `sources`, with the values of the moment

    def again(self) -> dict[int, Any]:
        """`sources` again, with the values that they have now."""
        return self.sources if self.mapped is None else self.mapped()

    def places(self) -> dict[int, str]:
        """By worker, where its arena should lie: where its policy is, if an arena can lie there.

        The policy of a worker lies where its first weights are, unless a device was named.
        """
        of_source: dict[int, Any] = {id(source): source for source in self.sources.values()}
        own = {key: _place(source) for key, source in of_source.items()}
        return {
            worker: own[id(source)] if self.devices.get(worker) is None else device_of_arena(self.devices[worker])
            for worker, source in self.sources.items()
        }


def first_weights(
    *,
    model_id: str | None,
    context: Any,
    weights: Any = None,
    model: Any = None,
    params_map: Mapping[int, Any] | None = None,
    devices: Sequence[Any] | None = None,
    device_map_fn: Callable[[int, Any], Any] | None = None,
    num_workers: int | None = None,
) -> First:
    """The first weights, from the arguments of init_on_sender().

    Raises ValueError for contradictory or missing ones, TypeError for a model that is no torch.nn.Module.
    """
    given = {
        "params_map": params_map,
        "context": context,
        "model": model,
        "weights": weights,
        "devices": devices,
        "device_map_fn": device_map_fn,
    }
    names = [name for name, value in given.items() if value is not None]
    if params_map is not None:
        _alone(names, "params_map")
        if not all(isinstance(worker, int) and isinstance(td, TensorDictBase) for worker, td in params_map.items()):
            raise ValueError("params_map must be a dict of worker index to TensorDict")
        return First(dict(params_map))
    if context is not None:
        _alone(names, "context")
        if model_id is None:
            raise ValueError("a context needs the model_id= of the model to find in it")
        return _from_context(model_id, context)
    if (model is None) == (weights is None):
        raise ValueError(
            f"init_on_sender() takes a context, a params_map, or one of model and weights; given: {names or 'nothing'}"
        )
    source = weights if model is None else _module(model, model_id)
    if device_map_fn is not None:
        if devices is not None or num_workers is None:
            raise ValueError("device_map_fn needs num_workers=, and no devices=")

        def mapped() -> dict[int, Any]:
            tensors = WeightStrategy().extract_weights(source) if isinstance(source, nn.Module) else source
            return {worker: device_map_fn(worker, tensors) for worker in range(num_workers)}

        return First(mapped(), mapped=mapped)
    if devices is None:
        raise ValueError("model or weights need devices=, one for each worker, or device_map_fn= with num_workers=")
    if num_workers is not None and num_workers != len(devices):
        raise ValueError(f"num_workers is {num_workers}, but devices has {len(devices)}; leave one of them out")
    return First(dict.fromkeys(range(len(devices)), source), dict(enumerate(devices)))


def resolve(context: Any, model_id: str) -> Any:
    """The model of this id in a context, or None."""
    if context is None:
        return None
    try:
        model = _resolve_model(context, model_id)
    except (AttributeError, KeyError, IndexError):
        model = None
    if model is None and model_id == "policy":
        model = getattr(context, "_fallback_policy", None)
    return model


def _from_context(model_id: str, context: Any) -> First:
    devices = dict(enumerate(context.policy_device))
    model = resolve(context, model_id)
    factories = list(getattr(context, "policy_factory", None) or ())
    if model is None and model_id == "policy" and any(factories):
        if all(factory is factories[0] for factory in factories):
            model = factories[0]()
        else:
            models = {worker: factory() for worker, factory in enumerate(factories) if factory is not None}
            own = {worker: each for worker, each in models.items() if isinstance(each, nn.Module)}
            return First(own, devices, apart=True)
    if model is None:
        raise ValueError(
            f"the collector has no {model_id!r} in this process; give the scheme its weights before making the "
            f"collector: scheme.init_on_sender(model_id={model_id!r}, model=..., devices=[...])"
        )
    return First(dict.fromkeys(range(context.num_workers), _module(model, model_id)), devices)


def _place(source: Any) -> str:
    """The default device of an arena of these weights."""
    places = {str(tensor.device) for tensor in tensors_of(source) if not is_lazy(tensor) and tensor.numel()}
    (place,) = places if len(places) == 1 else {"cpu"}
    return device_of_arena(place)


def _alone(names: list[str], name: str) -> None:
    if names != [name]:
        raise ValueError(
            f"{name} stands alone, but {', '.join(n for n in names if n != name)} was given too; leave one out"
        )


def _module(model: Any, model_id: str | None) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"ShmWeightSyncScheme requires an nn.Module policy, but {model_id or 'the model'} is a "
            f"{type(model).__name__}: it has no weights to send, so leave its scheme out"
        )
    return model
