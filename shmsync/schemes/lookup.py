"""Finding things in what users pass as a context: a collector, or any object with the right attributes."""

from __future__ import annotations

import re
import weakref
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
        """The same as get(), but it has to be there."""
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
    """The same; None when it is not there."""
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
