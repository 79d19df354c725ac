"""Which weights a trainer sends: the first ones, in the forms in which TorchRL gives them, and those without a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.weight_update.utils import _resolve_model

from ...errors import ShmSyncError
from ...schemes.devices import HOST, device_names
from ...schemes.strategy import WeightStrategy


class First(NamedTuple):
    """What the workers start with."""

    sources: Callable[[], dict[int, Any]]  # by worker, with the values of now; workers with the same object share them
    devices: Mapping[int, Any]  # of each worker's policy, where it is known
    apart: bool = False  # each worker has its own weights


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
    given = {"context": context, "params_map": params_map, "model": model, "weights": weights}
    names = [name for name, value in given.items() if value is not None]
    alone = devices is device_map_fn is num_workers is None
    if len(names) != 1 or not (alone or names[0] in ("model", "weights")):
        raise ValueError(
            "init_on_sender() takes one of context, params_map, model and weights, the last two with devices= or with "
            f"device_map_fn= and num_workers=; given: {names or 'nothing'}{'' if alone else ' and more'}"
        )
    if params_map is not None:
        if not all(isinstance(worker, int) and isinstance(td, TensorDictBase) for worker, td in params_map.items()):
            raise ValueError("params_map must be a dict of worker index to TensorDict")
        by_worker = dict(params_map)
        return First(lambda: by_worker, {})
    if context is not None:
        return _from_context(model_id or "policy", context)
    source = weights if model is None else _module(model, model_id)
    if device_map_fn is not None and num_workers is not None:

        def mapped() -> dict[int, Any]:
            tensors = WeightStrategy().extract_weights(source) if isinstance(source, nn.Module) else source
            return {worker: device_map_fn(worker, tensors) for worker in range(num_workers)}

        return First(mapped, {})
    if devices is None or num_workers not in (None, len(devices)):
        raise ValueError(
            "model or weights need devices=, one for each worker, or device_map_fn= with num_workers=; given: "
            f"devices={devices}, num_workers={num_workers}"
        )
    places = dict(enumerate(devices))
    return First(lambda: dict.fromkeys(places, source), places)


def _from_context(model_id: str, context: Any) -> First:
    devices = dict(enumerate(context.policy_device))
    model = resolve(context, model_id)
    factories = list(getattr(context, "policy_factory", None) or ())
    if model is None and model_id == "policy" and any(factories):
        if any(factory is not factories[0] for factory in factories):
            models = {worker: factory() for worker, factory in enumerate(factories) if factory is not None}
            own = {worker: each for worker, each in models.items() if isinstance(each, nn.Module)}
            return First(lambda: own, devices, apart=True)
        model = factories[0]()
    if model is None:
        raise ValueError(
            f"the collector has no {model_id!r} in this process; give the scheme its weights before making the "
            f"collector: scheme.init_on_sender(model_id={model_id!r}, model=..., devices=[...])"
        )
    shared = dict.fromkeys(range(context.num_workers), _module(model, model_id))
    return First(lambda: shared, devices)


def place_of(source: Any, device: Any) -> str:
    """Where an arena lies if nothing was said: where its workers' policies are, if that is known and it can lie there.

    Else where these weights are.
    """
    if device is None:
        found = {tensor.device for tensor in tensors_of(source)}
        device = found.pop() if len(found) == 1 else HOST
    wanted = torch.device("cuda", device) if isinstance(device, int) else device
    try:
        return device_names(wanted)[0] or HOST
    except (ShmSyncError, ValueError, TypeError, ImportError):  # no arena can lie there
        return HOST


def resolve(context: Any, model_id: str) -> Any:
    """The model of this id in a context, or None."""
    try:
        model = None if context is None else _resolve_model(context, model_id)
    except (AttributeError, KeyError, IndexError):
        model = None
    return getattr(context, "_fallback_policy", None) if model is None and model_id == "policy" else model


def _module(model: Any, model_id: str | None) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"ShmWeightSyncScheme requires an nn.Module policy, but {model_id or 'the model'} is a "
            f"{type(model).__name__}: it has no weights to send, so leave its scheme out"
        )
    return model


def tensors_of(weights: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module, a TensorDict or a flat mapping; none in other weights."""
    if isinstance(weights, nn.Module):
        yield from weights.parameters()
        yield from weights.buffers()
    elif isinstance(weights, (TensorDictBase, Mapping)):
        values: Any = weights.values(True, True) if isinstance(weights, TensorDictBase) else weights.values()
        yield from (value for value in values if isinstance(value, torch.Tensor))


def same_memory(weights: Any, own: Any) -> bool:
    """Are these weights tensors of the model, as in TensorDict.from_module(policy)? The first one tells."""
    first = next(tensors_of(weights), None)
    return first is not None and any(first.data_ptr() == tensor.data_ptr() for tensor in tensors_of(own))
