"""Finding things in what users pass as a context: a collector, or any object with the right attributes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from numbers import Integral
from typing import Any


class Arguments:
    """What init_on_sender() and init_on_worker() were given, wherever it was said."""

    def __init__(self, model_id: str, context: Any, kwargs: dict[str, Any]) -> None:
        if not isinstance(model_id, str):
            raise ValueError(f'model_id is a path such as "policy", not {model_id!r}')
        self.model_id = model_id
        self.context = context
        self._kwargs = kwargs

    def get(self, name: str) -> Any:
        """The keyword argument, else the context's attribute, else None."""
        value = self._kwargs.get(name)
        return getattr(self.context, name, None) if value is None else value

    def model(self) -> Any:
        """The model itself: `model=`, or what the context gives for the id; None if neither does."""
        if self._kwargs.get("model") is not None:
            return self._kwargs["model"]
        return None if self.context is None else find_model(self.context, self.model_id)

    def needed(self, name: str) -> Any:
        """What get() finds. Raises ValueError when it finds nothing."""
        value = self.get(name)
        if value is None:
            raise ValueError(f"{name} must be given, as {name}= or by a context that has .{name}")
        return value


def resolve_model(context: Any, model_id: str) -> Any:
    """The context's model of this id: what its get_model() gives, else along the path "env.transform[0]".

    Raises AttributeError, KeyError or IndexError when it is not there.
    """
    get_model = getattr(context, "get_model", None)
    if callable(get_model):
        return get_model(model_id)
    found = context
    for name, index in re.findall(r"([^.\[\]]+)|\[(-?\d+)\]", model_id):
        found = getattr(found, name) if name else found[int(index)]
    return found


def find_model(context: Any, model_id: str) -> Any:
    """The context's model of this id; None when it is not there."""
    try:
        return resolve_model(context, model_id)
    except (AttributeError, KeyError, IndexError):
        return None


def process_of(arguments: Arguments, index: int) -> Any:
    """A function that gives the worker's process as soon as there is one, or None."""
    procs, context = arguments.get("procs"), arguments.context
    held = None if context is None or getattr(context, "procs", None) is not procs else weakref.ref(context)

    def process() -> Any:
        current = procs if held is None else getattr(held(), "procs", None)
        return current[index] if current is not None and index < len(current) else None

    return process


def referenced_model(reference: Any, context_ref: weakref.ref[Any] | None) -> Any:
    """The model that a receiver was given: itself, or its id in a context. Raises ValueError for neither."""
    if reference is not None and not isinstance(reference, str):
        return reference
    if reference is None or context_ref is None:
        which = "" if reference is None else f" for {reference!r}"
        raise ValueError(f"no model is registered{which}; give init_on_worker() model= or a context that has it")
    context = context_ref()
    if context is None:
        raise ValueError(f"the context that had {reference!r} is gone; keep it as long as its receiver")
    return resolve_model(context, reference)


def chosen_workers(worker_ids: int | Sequence[int] | None, known: Sequence[int]) -> list[int]:
    """The indices that a send is for: all, one or several. Raises ValueError for an unknown one."""
    if worker_ids is None:
        return list(known)
    chosen = [worker_ids] if isinstance(worker_ids, Integral) else list(worker_ids)  # type: ignore[arg-type]
    unknown = [index for index in chosen if index not in known]
    if unknown:
        raise ValueError(f"worker {unknown[0]} is not registered; the registered ones are {known}")
    return sorted({int(index) for index in chosen})
