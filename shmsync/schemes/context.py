"""The arguments of init_on_sender() and init_on_worker(), and the models of a context.

A context is a collector, or any object with the right attributes: it has what is not given as a keyword. The keywords
are those of the whole API, whatever the scheme: one that a scheme does not use is ignored.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from ..engine.deadlines import check_worker, whole
from ..errors import ProtocolError

SENDER_KEYWORDS = frozenset({
    "actor_refs", "actors", "cached_weights", "collector_class", "collector_infos", "collector_rrefs", "device",
    "model", "num_collectors", "num_workers", "pipes", "procs", "ranks", "remote_collectors", "source_model", "store",
})  # fmt: skip
WORKER_KEYWORDS = frozenset({"actor_ref", "model", "pipe", "rank", "store", "wait", "worker_idx"})


class Arguments:
    """What init_on_sender() or init_on_worker() was given, wherever it was said.

    Raises ValueError for a model id that is none, TypeError for keywords that the API does not have, and ProtocolError
    for a collector of TorchRL's; `instead`: a sentence with what to give it.
    """

    def __init__(
        self, scheme: object, call: str, model_id: Any, context: Any, kwargs: dict[str, Any], instead: str = ""
    ):
        kind = type(scheme).__name__
        if not isinstance(model_id, str):
            raise ValueError(f'model_id is a path such as "policy", not {model_id!r}')
        known = SENDER_KEYWORDS if call == "init_on_sender" else WORKER_KEYWORDS
        if unknown := kwargs.keys() - known:
            names = ", ".join(f"{name}=" for name in sorted(unknown))
            raise TypeError(f"{kind}.{call}() takes no {names}; it takes model_id, context, {', '.join(sorted(known))}")
        torchrl = sys.modules.get("torchrl.collectors")
        if torchrl is not None and isinstance(context, torchrl.BaseCollector):
            raise ProtocolError(
                f"{kind} is for workers of your own, not for a {type(context).__name__} of TorchRL's. {instead}"
            )
        self.model_id = model_id
        self.context = context
        self._kwargs = kwargs

    def given(self, name: str) -> Any:
        """The keyword argument, else None."""
        return self._kwargs.get(name)

    def get(self, name: str) -> Any:
        """The keyword argument, else the context's attribute, else None."""
        value = self._kwargs.get(name)
        return getattr(self.context, name, None) if value is None else value

    def needed(self, name: str) -> Any:
        """What get() finds. Raises ValueError when it finds nothing."""
        value = self.get(name)
        if value is None:
            raise ValueError(f"{name} must be given, as {name}= or by a context that has .{name}")
        return value

    def check_count(self, listed: Sequence[Any] | None, what: str, *names: str) -> int | None:
        """The number of workers under one of these names. Raises ValueError when another number of them is listed."""
        for name in names:
            if (value := self.get(name)) is not None:
                count = whole(name, value, 0)
                if listed is not None and count != len(listed):
                    raise ValueError(f"{name} is {count} but there are {len(listed)} {what}; give one for each worker")
                return count
        return None

    def model(self) -> Any:
        """The model itself: `model=`, or what the context gives for the id; None if neither does."""
        if (model := self.given("model")) is not None:
            return model
        return None if self.context is None else find_model(self.context, self.model_id)


def find_object(context: Any, model_id: str) -> Any:
    """What the context has under this id: what its get_model() gives, else along the path "env.transform[0]".

    None when it is not there.
    """
    try:
        get_model = getattr(context, "get_model", None)
        if callable(get_model):
            return get_model(model_id)
        found = context
        for name, index in re.findall(r"([^.\[\]]+)|\[(-?\d+)\]", model_id):
            found = getattr(found, name) if name else found[int(index)]
        return found
    except (AttributeError, KeyError, IndexError):
        return None


def find_model(context: Any, model_id: str) -> Any:
    """The context's model of this id; None when it is not there, or when what is there has no weights."""
    found = find_object(context, model_id)
    return found if is_model(found) else None


def model_in(context: Any, model_id: str) -> Any:
    """The context's model of this id. Raises ValueError when it is not there, or has no weights."""
    found = find_object(context, model_id)
    if found is None:
        raise ValueError(f"the context has no model {model_id!r}; give model=, or a context that has it")
    if not is_model(found):
        raise ValueError(
            f"what the context has under {model_id!r} is a {type(found).__name__}, which has no weights; a model is a "
            "torch.nn.Module, a TensorDict or a dict of tensors. Give model= instead"
        )
    return found


def find_source(weights: Any, model_id: str, context: Any, cached: Any = None, model: Any = None) -> Any:
    """What a send of `weights` is about: a module, weights, or None.

    A string is the id of a model in the context. None is the cached weights, else the model that init_on_sender() got;
    else the context's: its cached weights, its model of this id, and for "policy" its `_fallback_policy`.
    """
    if isinstance(weights, str) and (weights != model_id or model is None):
        if context is None:
            raise ValueError(f"{weights!r} names a model of a context, and there is none; pass the model itself")
        return model_in(context, weights)
    if weights is not None and not isinstance(weights, str):
        return weights
    if weights is None and cached is not None:
        return cached
    if model is not None or context is None:
        return model
    get_cached = getattr(context, "get_cached_weights", None)
    if callable(get_cached) and (cached := get_cached(model_id)) is not None:
        return cached
    found = find_model(context, model_id)
    if found is None and model_id == "policy":
        found = getattr(context, "_fallback_policy", None)
    return found if is_model(found) else None


def is_model(found: Any) -> bool:
    """Does it have weights? A context may have something else under the name of a model."""
    if isinstance(found, (nn.Module, TensorDictBase)):
        return True
    return isinstance(found, Mapping) and any(isinstance(v, torch.Tensor) or is_model(v) for v in found.values())


def chosen_workers(worker_ids: int | Sequence[int] | None, known: Sequence[int]) -> list[int]:
    """The indices that a send is for: all, one or several. Raises ValueError for an unknown one."""
    if worker_ids is None:
        return list(known)
    chosen: Any = (
        worker_ids if isinstance(worker_ids, Iterable) and not isinstance(worker_ids, Integral) else [worker_ids]
    )
    found = {check_worker(index) for index in chosen}
    for index in found:
        if index not in known:
            raise ValueError(f"worker {index} is not registered; the registered ones are {known}")
    return sorted(found)
