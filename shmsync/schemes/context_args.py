"""The arguments of init_on_sender() and init_on_worker(), and the models of a context.

A context is a collector, or any object with the right attributes: it has what is not given as a keyword.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from ..engine.deadlines import whole
from ..errors import ProtocolError


class Arguments:
    """What init_on_sender() and init_on_worker() were given, wherever it was said."""

    def __init__(self, model_id: str, context: Any, kwargs: dict[str, Any]) -> None:
        if not isinstance(model_id, str):
            raise ValueError(f'model_id is a path such as "policy", not {model_id!r}')
        self.model_id = model_id
        self.context = context
        self.kwargs = kwargs
        self.read: set[str] = set()  # those that were used so far

    def given(self, name: str) -> Any:
        """The keyword argument, else None."""
        self.read.add(name)
        return self.kwargs.get(name)

    def get(self, name: str) -> Any:
        """The keyword argument, else the context's attribute, else None."""
        value = self.given(name)
        return getattr(self.context, name, None) if value is None else value

    def count(self, name: str) -> int | None:
        """What get() finds, as a number of workers. Raises TypeError, ValueError for what is none."""
        value = self.get(name)
        return None if value is None else whole(name, value, 0)

    def reader(self, name: str) -> Callable[[], Any]:
        """Gives the keyword argument, or what the context has at the time of each call; None once that is gone."""
        value = self.given(name)
        if value is not None or self.context is None:
            return lambda: value
        context = weakref.ref(self.context)
        return lambda: getattr(context(), name, None)

    def model(self) -> Any:
        """The model itself: `model=`, or what the context gives for the id; None if neither does."""
        if (model := self.given("model")) is not None:
            return model
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


def find_object(context: Any, model_id: str) -> Any:
    """What the context has under this id, whatever it is; None when it is not there."""
    try:
        return resolve_model(context, model_id)
    except (AttributeError, KeyError, IndexError):
        return None


def find_model(context: Any, model_id: str) -> Any:
    """The context's model of this id; None when it is not there, or when what is there has no weights."""
    found = find_object(context, model_id)
    return found if is_model(found) else None


def model_at(context: Any, name: str) -> Any:
    """The model that the context has as this attribute, else None."""
    found = getattr(context, name, None)
    return found if is_model(found) else None


def model_in(context: Any, model_id: str) -> Any:
    """The context's model of this id. Raises ValueError when it is not there, or has no weights."""
    try:
        found = resolve_model(context, model_id)
    except (AttributeError, KeyError, IndexError) as error:
        raise ValueError(f"the context has no model {model_id!r}; give model=, or a context that has it") from error
    if not is_model(found):
        raise ValueError(
            f"what the context has under {model_id!r} is a {type(found).__name__}, which has no weights; a model is a "
            "torch.nn.Module, a TensorDict or a dict of tensors. Give model= instead"
        )
    return found


def is_model(found: Any) -> bool:
    """Does it have weights? A context may have something else under the name of a model."""
    if isinstance(found, (nn.Module, TensorDictBase)):
        return True
    return isinstance(found, Mapping) and any(
        isinstance(value, torch.Tensor) or is_model(value) for value in found.values()
    )


def named_content(content: Any, model_id: str) -> Any:
    """Weights, without the id of the model that they are for. Raises ValueError when that is another model."""
    if type(content) is not tuple or len(content) != 2 or not isinstance(content[0], str):
        return content
    if content[0] != model_id:
        raise ValueError(
            f"weights of {content[0]!r} came to the receiver of {model_id!r}; make a receiver for {content[0]!r} too"
        )
    return content[1]


def refuse_collector(scheme: object, context: Any, instead: str) -> None:
    """Raise ProtocolError for a collector of TorchRL's. `instead`: a sentence with what to give it."""
    torchrl = sys.modules.get("torchrl.collectors")
    if torchrl is not None and isinstance(context, torchrl.BaseCollector):
        raise ProtocolError(
            f"{type(scheme).__name__} is for workers of your own, not for a {type(context).__name__} of TorchRL's. "
            f"{instead}"
        )


def check_names(scheme: Any, attribute: str, arguments: Arguments) -> None:
    """Raise TypeError for keyword arguments that this side of the scheme does not take, and that were not read."""
    takes, call = getattr(scheme, attribute), "init_on_sender" if attribute == "sender_takes" else "init_on_worker"
    if unknown := arguments.kwargs.keys() - arguments.read - takes:
        names = ", ".join(f"{name}=" for name in sorted(unknown))
        raise TypeError(
            f"{type(scheme).__name__}.{call}() takes no {names}; it takes model_id, context, {', '.join(sorted(takes))}"
        )


def says_what_it_takes(kind: type, attribute: str) -> bool:
    """Does no subclass of the class that has the attribute read arguments in its own way?

    Such a subclass is believed first: what it has not read is refused afterwards.
    """
    reading = {"create_sender", "create_receiver", "roster"}
    base = next(each for each in kind.__mro__ if attribute in vars(each))
    return not any(reading & vars(each).keys() for each in kind.__mro__[: kind.__mro__.index(base)])


def process_of(arguments: Arguments, index: int) -> Any:
    """A function that gives the worker's process as soon as there is one, or None."""
    procs = arguments.reader("procs")

    def process() -> Any:
        current = procs()
        return current[index] if current is not None and index < len(current) else None

    return process


def chosen_workers(worker_ids: int | Sequence[int] | None, known: Sequence[int]) -> list[int]:
    """The indices that a send is for: all, one or several. Raises ValueError for an unknown one."""
    if worker_ids is None:
        return list(known)
    one = isinstance(worker_ids, Integral) or not hasattr(worker_ids, "__iter__")  # an IntFlag has __iter__ too
    chosen: list[Any] = [worker_ids] if one else list(worker_ids)  # type: ignore[arg-type]
    odd = [index for index in chosen if isinstance(index, bool) or not isinstance(index, Integral)]
    if odd:
        raise ValueError(f"worker_ids are indices such as 0 or [0, 1], not {odd[0]!r}; the registered ones are {known}")
    unknown = [index for index in chosen if index not in known]
    if unknown:
        raise ValueError(f"worker {unknown[0]} is not registered; the registered ones are {known}")
    return sorted({int(index) for index in chosen})
