"""How the step() of an optimizer becomes a version of the module that its Publisher has adopted.

The step() of an optimizer that adopt() was given runs in an update(). That of any other is refused outside one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ... import _native
from ...errors import ProtocolError
from ..bind.compiled import leave_alone, skip


def as_list(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> list[torch.optim.Optimizer]:
    """What adopt() takes: none, one, or several. Raises TypeError for anything else."""
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for each in optimizers:
        if not (hasattr(each, "param_groups") and callable(getattr(each, "step", None))):
            raise TypeError(f"optimizer= takes a torch.optim.Optimizer, or a list of them, not a {type(each).__name__}")
    return optimizers


def step_inside_update(
    optimizer: torch.optim.Optimizer, inside: Callable[[], bool], update: Callable[[], Any]
) -> Callable[[], None]:
    """Let step() of this optimizer run in an update(), or be part of its thread's. Returns what undoes that."""
    _native.tell_dynamo()  # the next call may be compiled
    inner, had = optimizer.step, vars(optimizer).get("step")

    # Dynamo skips this frame and compiles the optimizer's own step below.
    @skip
    def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if inside():
            return inner(*args, **kwargs)
        with update():
            return inner(*args, **kwargs)

    if hasattr(inner, "_wrapped_by_lr_sched"):  # schedulers that are made later look for this attribute
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    method = MethodType(step, optimizer)  # schedulers wrap a method
    optimizer.step = method  # type: ignore[method-assign]

    def remove() -> None:
        if vars(optimizer).get("step") is not method:
            return  # something else has wrapped it since; inside() lets every call through
        if had is None:
            del optimizer.step
        else:
            optimizer.step = had  # type: ignore[method-assign]

    return remove


def refuse_steps(stray: Callable[[Iterable[torch.Tensor]], bool]) -> Callable[[], None]:
    """Refuse each step of which this is true, of its parameters. Returns what ends that."""

    @leave_alone
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if stray(tensor for group in optimizer.param_groups for tensor in group["params"]):
            raise ProtocolError(
                f"this {type(optimizer).__name__} steps parameters of an adopted module outside update(), while "
                "workers read them; pass it to adopt(module, optimizer) and take (or compile) its step afterwards, "
                "or step inside `with pub.update():`"
            )

    return register_optimizer_step_pre_hook(before_step).remove
