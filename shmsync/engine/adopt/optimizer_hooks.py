"""Optimizers of an adopted module: their step() runs inside update(), and steps what the module has."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ManifestMismatch, ProtocolError
from ...memory.devices import laid_out
from ...memory.dynamo import skip
from ...memory.manifest import Key
from ...memory.strides import same_order
from ...memory.torch_modes import plainly

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Section(NamedTuple):
    """One arena whose update() a step has to run in."""

    owner: object  # its adoption
    under_way: Callable[[], bool]  # is some thread in its update()?
    joined: Callable[[torch.optim.Optimizer], bool]  # need this step open none? Raises if it may not step
    update: Callable[[torch.optim.Optimizer], AbstractContextManager[Any]]


class StepGate:
    """Replaces the step() of one optimizer, for every arena that adopted parameters of it.

    It goes when the last of them closes. If something else has wrapped it meanwhile, as learning-rate schedulers do, it
    stays where it is, lets every call through, and is used again by the next adopt().
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._sections: tuple[Section, ...] = ()  # replaced as a whole: an interrupt may land anywhere
        self._step = optimizer.step
        self._was_set = vars(optimizer).get("step")  # None: the class's own method

        # Dynamo, which the optimizer has imported, skips this frame and compiles the optimizer's own step below.
        @skip
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._run(self._sections, args, kwargs)

        step._shmsync_gate = self  # type: ignore[attr-defined]
        if hasattr(self._step, "_wrapped_by_lr_sched"):  # schedulers made later look for this attribute
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._method = MethodType(step, optimizer)  # schedulers wrap a method
        optimizer.step = self._method  # type: ignore[method-assign]
        self._hook: Any = None
        self.mind()

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> StepGate:
        """The gate that the optimizer has, or a new one."""
        gate = getattr(optimizer.step, "_shmsync_gate", None)  # functools.wraps() hands it on
        return gate if isinstance(gate, cls) and gate.optimizer() is optimizer else cls(optimizer)

    def join(self, section: Section) -> None:
        """Let each step run in this section too."""
        self._sections = (*(each for each in self._sections if each.owner is not section.owner), section)
        self.mind()

    def mind(self) -> None:
        """Refuse steps that come by another way, such as a step() that was taken or compiled before adopt().

        Called whenever a section begins or ends. There is a hook while steps are refused, and none else: so a compiled
        step sees that something has changed, and one that is allowed is compiled in one piece.
        """
        refuse = not all(section.under_way() for section in self._sections)
        if not refuse and self._hook is not None:
            self._hook.remove()
            self._hook = None
        optimizer = self.optimizer()
        if refuse and self._hook is None and optimizer is not None and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self._hook = optimizer.register_step_pre_hook(_refusal())

    def leave(self, owner: object) -> None:
        """Leave this owner's section out from now on."""
        self._sections = tuple(each for each in self._sections if each.owner is not owner)
        self.mind()
        optimizer = self.optimizer()
        if self._sections or optimizer is None or vars(optimizer).get("step") is not self._method:
            return
        if self._was_set is None:
            del optimizer.step
        else:
            optimizer.step = self._was_set  # type: ignore[method-assign]

    @skip
    def _run(self, sections: tuple[Section, ...], args: Any, kwargs: Any) -> Any:
        # One `with` inside the other: an interrupt may land anywhere, and an ExitStack would lose some.
        optimizer = self.optimizer()
        while sections and optimizer is not None:
            section, sections = sections[0], sections[1:]
            if not section.joined(optimizer):
                with section.update(optimizer):
                    return self._run(sections, args, kwargs)
        return self._step(*args, **kwargs)


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    raise ProtocolError(
        f"this {type(optimizer).__name__}.step was taken or compiled before adopt(), and would write the weights "
        "outside update(), while workers read them; call it inside `with pub.update():`, or take (and compile) "
        "optimizer.step after adopt()"
    )


@functools.cache  # one object, so that a compiled step knows it again
def _refusal() -> Callable[..., None]:
    return torch.compiler.disable(_refuse)


class OptimizerWatch:
    """Looks at every optimizer that steps while an adopted module has parameters that are not what it was made for.

    adopt() need not get the optimizer, so it is found when it steps: torch calls a global hook. There is none
    as long as nothing has been replaced, or laid out in another order.
    """

    def __init__(self, placed: Mapping[Key, torch.Tensor]) -> None:
        # Parameters that the module has no more, and where it had them.
        self.orphans: list[tuple[Key, weakref.ref[torch.Tensor]]] = []
        self._placed = placed
        self._hook: Any = None
        # The optimizers that were looked at since the last change, and the state that each had; None: nothing changed.
        self._checked: weakref.WeakKeyDictionary[Any, Any] | None = None
        self._inside: Callable[[], bool] = lambda: True
        self._known: Callable[[], Sequence[torch.optim.Optimizer]] = list

    def refuse_outside(self, inside: Callable[[], bool], known: Callable[[], Sequence[torch.optim.Optimizer]]) -> None:
        """Refuse steps of the module's parameters while the calling thread is not `inside` update().

        The steps of `known` optimizers go through gates.
        """
        self._inside, self._known = inside, known
        self._hang()

    def replaced(self, old: Iterable[tuple[Key, torch.Tensor]]) -> None:
        """These are not the module's any more."""
        self.orphans = [(key, ref) for key, ref in self.orphans if ref() is not None]
        known = {id(ref()) for _, ref in self.orphans}
        fresh = [(key, weakref.ref(tensor)) for key, tensor in old if id(tensor) not in known]
        if fresh:
            self.orphans += fresh
            self.changed()

    def changed(self) -> None:
        """Look at each optimizer once more."""
        self._checked = weakref.WeakKeyDictionary()
        self._hang()

    def _hang(self) -> None:
        if self._hook is None:
            reference = weakref.ref(self)

            @torch.compiler.disable
            def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                watch = reference()
                if watch is not None:
                    watch.look(optimizer)

            self._hook = register_optimizer_step_pre_hook(before_step)
            weakref.finalize(self, self._hook.remove).atexit = False  # of a Publisher that was not closed

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step: let its state follow its parameters, and warn if it steps one that the module has no more.

        Raises ProtocolError outside update(), ManifestMismatch for state that cannot follow.
        """
        if not self._inside() and not any(optimizer is each for each in self._known()):
            own = {id(tensor) for tensor in self._placed.values()}
            if any(id(tensor) in own for tensor in stepped_by(optimizer)):
                raise ProtocolError(
                    f"this {type(optimizer).__name__} steps parameters of an adopted module outside update(), while "
                    "workers read them; pass it to adopt(module, optimizer), or step inside `with pub.update():`"
                )
        checked, state = self._checked, getattr(optimizer, "state", None)
        if checked is None or (optimizer in checked and checked[optimizer] is state):
            return
        if problems := stuck_states(optimizer, laid(self._placed.values())):
            raise ManifestMismatch(
                "parameters lie as the arena has them, in another order, and the optimizer's state cannot follow: "
                f"{'; '.join(problems)}; clone the state first"
            )
        states_follow(optimizer, self._placed.values())
        if gone := self._orphans_of(optimizer, self._placed):
            warnings.warn(
                f"an optimizer steps {', '.join(gone)}, but the adopted module has another parameter there now: "
                "no worker would get its steps; make a new optimizer, or put the module's parameters into its groups",
                stacklevel=4,
            )
        checked[optimizer] = state

    def refuse_orphans(self, optimizer: torch.optim.Optimizer, current: Mapping[Key, torch.Tensor]) -> None:
        """Raise ProtocolError if a step of this optimizer would go to a parameter that the module has no more.

        `current`: the parameters that it has.
        """
        if gone := self._orphans_of(optimizer, current):
            raise ProtocolError(
                f"{', '.join(gone)} of the adopted module was replaced, but {type(optimizer).__name__} still steps the "
                "one before: no worker would get its steps. Make a new optimizer and pass it to adopt() again, or put "
                "the module's parameters into param_groups"
            )

    def _orphans_of(self, optimizer: torch.optim.Optimizer, current: Mapping[Key, torch.Tensor]) -> list[str]:
        """Names of the parameters of which the optimizer has the one before, and not the current one."""
        if not self.orphans:
            return []
        stepped = {id(tensor) for tensor in stepped_by(optimizer)}
        present = {id(tensor) for tensor in current.values()}
        return [
            ".".join(key)
            for key, ref in self.orphans
            if (old := ref()) is not None and id(old) in stepped - present and id(current.get(key)) not in stepped
        ]

    def close(self) -> None:
        """Look at no optimizer any more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """What adopt() takes: none, one, or several. Raises TypeError for anything else."""
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for each in optimizers:
        if not (hasattr(each, "param_groups") and callable(getattr(each, "step", None))):
            raise TypeError(f"optimizer= takes a torch.optim.Optimizer, or a list of them, not a {type(each).__name__}")
    return optimizers


def stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of its state, by a name for messages."""
    return {
        f"{name} of parameter {number} in the {type(optimizer).__name__}'s state": value
        for number, (_, state) in enumerate(optimizer.state.items())
        if isinstance(state, Mapping)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    }


Laid = Iterable[tuple[torch.Tensor, tuple[int, ...]]]  # parameters, and the strides that they have or get


def laid(parameters: Iterable[torch.Tensor]) -> Laid:
    """Parameters that are at their places, and how they lie there."""
    return [(parameter, parameter.stride()) for parameter in parameters]


def _out_of_order(optimizer: torch.optim.Optimizer, parameters: Laid) -> Iterable[tuple[str, Any, tuple[int, ...]]]:
    """State as large as its parameter that lies in another order: fused optimizers walk both as plain memory."""
    for parameter, strides in parameters:
        state = optimizer.state.get(parameter)
        for name, value in state.items() if isinstance(state, Mapping) else ():
            same = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if same and value.layout is torch.strided and not same_order(value.shape, value.stride(), strides):
                yield name, value, strides


def stuck_states(optimizer: torch.optim.Optimizer, parameters: Laid) -> list[str]:
    """State that would have to be laid out in another order, but is part of larger memory that others may use."""
    return [
        f"{name} {tuple(value.shape)} is a view of a larger tensor"
        for name, value, _ in _out_of_order(optimizer, parameters)
        if value.untyped_storage().nbytes() != value.nbytes
    ]


def states_follow(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Lay the state of these parameters out as the parameters are in the slab."""
    with plainly():
        for _, value, strides in _out_of_order(optimizer, laid(parameters)):
            value.data = laid_out(value.data, strides)
