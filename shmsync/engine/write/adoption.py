"""Adoption: a module's parameters become the slab itself (slots = 1), so that an update copies nothing.

The Parameter objects stay, and only their `.data` is a view of the slab. A program may give a parameter other memory at
any time: `p.data = averaged`, a new nn.Parameter, load_state_dict(assign=True). So one native pass looks at the module
at each update() and publish() (copy_plan.py). A parameter that left the slab is copied back and points there
again. Buffers stay private, since forward passes write them, and are copied when an update ends.

A load goes into private copies, and becomes a version when it has succeeded: torch writes what fits before it raises
for the rest. In the slab, optimistic readers could not see that bytes were changed and put back.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ... import _native
from ...errors import ManifestMismatch, ProtocolError
from ...memory.arena import Arena, lies_in, mapped_ranges
from ...memory.devices import assign
from ...memory.manifest import Key, layout_of
from ...memory.torch_modes import copy_into, counts_changes, plainly, run_plainly
from ..bind.binding import references_to, refuse_max_norm
from ..bind.guard import Proxy
from ..deadlines import deadline_after
from ..source.manifest_check import (
    elsewhere,
    mismatches,
    overlapping,
    same_bytes,
    shown_by_others,
    tied_apart,
    untied,
)
from ..source.wrappers import modules_in
from .copy_plan import CopyPlan
from .optimizer_steps import refuse_steps, step_inside_update

R = TypeVar("R")


@run_plainly
def adopt(writer: Any, publisher: Any, source: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    """As Publisher.adopt(). `publisher`: whose writer it is, and what a step keeps alive."""
    deadline = deadline_after(None, writer.timeout)
    with writer.lock:
        writer.ready(deadline)
        adopted = writer.adopted
        if adopted is None:
            adopted = Adoption(source, writer, publisher)
            placement = adopted.placement()
            adopted.check_optimizers(optimizers)
            views = writer.arena.views(0)
            if writer.native.poisoned or any(
                tensor.dtype != views[key].dtype or not same_bytes(tensor, views[key])
                for key, tensor in writer.plans.collect(source).items()
            ):
                plan = writer.plan_of(source)
                try:
                    writer.write(plan, deadline)
                finally:
                    plan.release()
                writer.slots.wait_until_published(deadline)
            placement.apply(copy=False)
            adopted.watch_next()
            adopted.refuse_other_steps()
            writer.adopted, writer.source = adopted, source
        elif adopted.source is not source or not optimizers:
            raise ProtocolError("this arena has adopted a module already; make another Publisher for this one")
        else:
            adopted.check_optimizers(optimizers)
        adopted.step_inside_update(optimizers, publisher.update)


class Adoption:
    """The module, or TensorDict, whose parameters are views of one arena's only slot.

    Args:
        source: to adopt; nothing is changed before its first placement() is applied.
        writer: of the arena.
        publisher: whose update() writes it; held weakly, for the module does not keep it.

    Raises ManifestMismatch for a source that does not fit, ProtocolError for one that may not be adopted.
    """

    def __init__(self, source: Any, writer: Any, publisher: Any) -> None:
        self.source, self._plans = source, writer.plans
        self.arena: Arena = writer.arena
        self.name: str = writer.name
        self._publisher = weakref.ref(publisher)
        arena, name = self.arena, self.name
        self.views = arena.views(0, writable=True)
        self._plan: CopyPlan | None = None  # of the buffers; None: see where the parameters are
        self._loading: int | None = None  # the thread that is in load()
        self._undo: list[Callable[[], object]] = []  # what restore() gives back besides the parameters
        self._watched: list[torch.Tensor] | None = []  # for stray writes, one at a time; None: one was warned of
        self._turn = 0  # which of them is watched now
        self._writes = 0  # into it, so far
        self._placed = self._fitting()
        self._references: list[Any] = []  # of torch to them: each update() looks at all of them twice
        theirs = mapped_ranges()
        for key, tensor in self._placed.items():
            if lies_in(tensor, theirs):
                raise ProtocolError(
                    f"{'.'.join(key)} shows the memory of an arena already: its module is adopted by another "
                    f"Publisher, or bound to a Subscriber. Close that first, or publish() the module to {name!r}"
                )
            if layout_of(tensor) != (strides := arena.manifest.by_key[key].strides) and tensor.numel():
                raise ManifestMismatch(
                    f"{'.'.join(key)} lies in another memory order, strides {tensor.stride()}, than in arena {name!r}, "
                    f"{strides}; make the Publisher of the module that it adopts"
                )

    def _inside(self) -> bool:
        """May the calling thread write the parameters: is it in update(), or is the arena closed?"""
        publisher = self._publisher()
        it = None if publisher is None else publisher._writer
        return it is None or it.closed or it.adopted is not self or it.updating_thread == threading.get_ident()

    # ---- what the source has

    def _fitting(self) -> dict[Key, torch.Tensor]:
        """The parameters that the source has now, all checked."""
        source, arena = self.source, self.arena
        tensors = self._plans.collect(source)
        problems = mismatches(tensors, arena, partial=False, source_is="adopted module")
        problems = problems or [f"{each}; pass that place to Publisher(device=)" for each in elsewhere(tensors, arena)]
        if problems:
            raise _misfit(self.name, problems)
        placed = {k: t for k, t in tensors.items() if isinstance(t, nn.Parameter) or not isinstance(source, nn.Module)}
        problems = [
            f"{first.name} and {other.name} are one tensor in the arena but two in the module"
            for first, other in untied(tensors, arena)
            if first.key in placed or other.key in placed
        ]
        problems += tied_apart(placed, arena, "module")
        named = {".".join(key): tensor for key, tensor in tensors.items()}
        if isinstance(source, nn.Module):
            refuse_max_norm(
                source,
                "but workers read adopted weights meanwhile. Build it without max_norm, and normalise the weight "
                "inside update(); or publish() the module instead of adopting it",
            )
            known = {id(tensor) for tensor in tensors.values()}
            named |= {name: tensor for name, tensor in _all_tensors(source) if id(tensor) not in known}
        moving = {id(tensor) for tensor in placed.values()}
        problems += [
            f"{one} and {two} share memory, and would not after adopt(): give one of them private memory"
            for one, two in overlapping(named, moving)
        ]
        if problems:
            raise _misfit(self.name, problems)
        return placed

    def plan(self) -> CopyPlan | Placement:
        """How the buffers are copied, if all parameters are in the slab; else what brings them back first."""
        if self._plan is not None and self._plan.match(self.source):
            return self._plan
        self._plan = None
        return self.placement()

    def placement(self) -> Placement:
        """Find the parameters that are not in the slab.

        Raises, before anything is changed, ManifestMismatch for tensors that do not fit, and ProtocolError while a
        tensor outside the source shows what would be overwritten.
        """
        placed = self._fitting()
        away = {key for key, tensor in placed.items() if not _shows(tensor, self.views[key])}
        leaving = [old for key, old in self._placed.items() if key in away and placed[key] is not old]
        # Torch counts the tensors over the slab, and does not say which part each of them shows.
        if away and shown_by_others([*self.arena.made_views(), *leaving, *placed.values()], list(self.views.values())):
            raise ProtocolError(
                f"{', '.join(sorted(map('.'.join, away)))} of the adopted module would overwrite memory of arena "
                f"{self.name!r} while a tensor outside the module shows the arena: a view, a backup `p.data`, or what "
                "swap_tensors() took out. Delete it, or keep its clone() instead, then repeat the call"
            )
        return Placement(self, placed, away, leaving)

    def record(self, parameters: dict[Key, torch.Tensor]) -> CopyPlan:
        """These are the source's parameters, all in the slab now; the plan that copies its buffers."""
        self._placed = parameters
        self._references = references_to(parameters.values())
        if self._watched is not None:
            self._watched = [tensor for tensor in parameters.values() if counts_changes(tensor)]
            self.watch_next()
        for child in modules_in(self.source) if isinstance(self.source, nn.Module) else ():
            for name in ("load_state_dict", "_load_from_state_dict"):
                if not isinstance(child.__dict__.get(name), _Loading) and hasattr(child, name):
                    self._undo.append(_Loading(child, name, self).remove)
        self._plan = self._plans.make(self.source)
        return self._plan

    def restore(self) -> None:
        """Make the parameters private again, with the values they have; what was one memory stays one."""
        self._references.clear()
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        copies: dict[int, torch.Tensor] = {}
        with plainly():
            for key, tensor in self._placed.items():
                view = self.views[key]
                if tensor.data_ptr() == view.data_ptr() and tensor.numel():
                    tensor.data = copies.setdefault(view.data_ptr(), view.clone())

    # ---- writes outside update()

    def watch_next(self) -> None:
        """An update() has ended: until the next one, a write into the next parameter is a stray one."""
        if self._watched:
            self._turn = (self._turn + 1) % len(self._watched)
            self._writes = self._watched[self._turn]._version

    def warn_of_stray_writes(self) -> None:
        """Warn, once, if torch has written the watched parameter since the last update()."""
        if not self._watched or (tensor := self._watched[self._turn])._version == self._writes:
            return
        self._watched = None
        name = next(".".join(key) for key, each in self._placed.items() if each is tensor)
        warnings.warn(
            f"{name} of the adopted module was written outside update(): workers of arena {self.name!r} may have read "
            "it half written. Write inside `with pub.update():`",
            stacklevel=4,
        )

    # ---- steps

    def step_inside_update(self, optimizers: Sequence[torch.optim.Optimizer], update: Callable[[], Any]) -> None:
        """Let the step() of each run in an update(), or be part of its thread's."""
        for optimizer in optimizers:
            self._undo.append(step_inside_update(optimizer, self._inside, update))

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ValueError for one that steps no parameter of the source."""
        for optimizer in optimizers:
            stepped = [id(tensor) for group in optimizer.param_groups for tensor in group["params"]]
            if {id(tensor) for tensor in self._placed.values()}.isdisjoint(stepped):
                raise ValueError(
                    f"the optimizer steps {len(stepped)} parameter(s), none of them of the module to adopt; pass the "
                    "optimizer of this module"
                )

    def refuse_other_steps(self) -> None:
        """Refuse steps of the parameters outside update(), by other optimizers or past the step() that it is in."""
        reference = weakref.ref(self)

        def stray(parameters: Iterable[torch.Tensor]) -> bool:
            adoption = reference()
            if adoption is None or adoption._inside():
                return False
            return not {id(tensor) for tensor in adoption._placed.values()}.isdisjoint(map(id, parameters))

        remove = refuse_steps(stray)
        weakref.finalize(self, remove).atexit = False  # of a Publisher that was not closed
        self._undo.append(remove)

    # ---- loads

    def refuses_load(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """A key under which a load of a module around the source would write a parameter outside update()."""
        if self._loading == threading.get_ident() or self._inside():
            return None
        own = {id(tensor) for tensor in self._placed.values()}
        names = (prefix + name for name, tensor in module._parameters.items() if id(tensor) in own)
        return next((name for name in names if name in state_dict), None)

    def load(self, run: Callable[[], R]) -> R:
        """What run(), which loads into the source, returns: as a version, or with everything as it was.

        After an update() that failed nobody reads, so it writes into the slab; the publish() that repairs takes it.
        """
        publisher = self._publisher()
        if self._loading == threading.get_ident() or publisher is None:
            return run()
        if publisher._writer.native.poisoned and not self._inside():
            with publisher._writer.lock:  # no other thread repairs meanwhile
                self._loading = threading.get_ident()
                try:
                    return run()
                finally:
                    self._loading = None
        stores: list[dict[str, Any]] = [
            store for each in modules_in(self.source) for store in (each._parameters, each._buffers)
        ]
        before = [dict(store) for store in stores]
        filled = {key: tensor for key, tensor in self._placed.items() if tensor.numel()}  # the others have no address
        placed = list({id(tensor): (tensor, self.views[key]) for key, tensor in filled.items()}.values())
        own = {id(tensor) for tensor, _ in placed}
        with plainly():
            others = [t for store in before for t in store.values() if t is not None and id(t) not in own]
            values = [(tensor, tensor.detach().clone()) for tensor in others if tensor.device.type != "meta"]
            copies: dict[int, torch.Tensor] = {}
            private = [copies.setdefault(view.data_ptr(), view.clone()) for _, view in placed]
            _native.set_data([tensor for tensor, _ in placed], private)
        self._loading = threading.get_ident()
        try:
            result = run()
            with plainly():  # what it has loaded in place goes back, and gets the values while readers are kept out
                kept = {id(tensor) for store in stores for tensor in store.values()}
                pairs = zip(placed, private, strict=True)
                loaded = [pair for pair, copy in pairs if id(pair[0]) in kept and _shows(pair[0], copy)]
                _native.set_data([tensor for tensor, _ in loaded], [view for _, view in loaded])
            self.watch_next()  # it has written into private copies
            with nullcontext() if self._inside() else publisher.update():
                if isinstance(plan := self.plan(), Placement):  # now: what the body writes next comes later
                    plan.apply()
                with plainly():
                    for _, view in loaded:
                        assign(view, copies[view.data_ptr()])
            return result
        except BaseException:
            with plainly():
                for store, held in zip(stores, before, strict=True):
                    store.clear()
                    store.update(held)
                for tensor, value in values:
                    copy_into(tensor, value)
                _native.set_data([tensor for tensor, _ in placed], [view for _, view in placed])
            self._plan = None
            raise
        finally:
            self._loading = None
            self.watch_next()


class Placement(NamedTuple):
    """The parameters that an adopted module has, all checked; apply() brings into the slab those that lie elsewhere."""

    adoption: Adoption
    parameters: dict[Key, torch.Tensor]
    away: set[Key]  # of the parameters: those that lie elsewhere
    leaving: list[torch.Tensor]  # parameters that the module has no more, at places that are overwritten

    @run_plainly
    def apply(self, *, copy: bool = True) -> CopyPlan:
        """Bring back what is away, while readers are kept out; the plan that copies the buffers."""
        for old in self.leaving:
            old.data = old.data.clone()  # what was replaced keeps its values
        views, slab = self.adoption.views, self.adoption.arena.ranges()
        moving = [(self.parameters[key], views[key]) for key in self.away]
        if copy:  # two that changed places read each other's
            values = [tensor.data.clone() if lies_in(tensor, slab) else tensor.data for tensor, _ in moving]
            for (_, view), value in zip(moving, values, strict=True):
                assign(view, value)
        _native.set_data([tensor for tensor, _ in moving], [view for _, view in moving])
        return self.adoption.record(self.parameters)

    def release(self) -> None:
        """As CopyPlan.release(): there is none yet."""


class _Loading(Proxy):
    """Replaces `load_state_dict()` of an adopted module, and of each in it, or the part that writes its own tensors.

    That part is called alone when a module is loaded that has the adopted one inside.
    """

    def __init__(self, module: nn.Module, name: str, adoption: Adoption) -> None:
        self._adoption = weakref.ref(adoption)
        super().__init__(module, name)

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load, and publish; raise ProtocolError for the part alone."""
        adoption = self._adoption()
        if adoption is None:  # its Publisher is gone
            return self.inner(state_dict, *args, **kwargs)
        if self.method == "load_state_dict":
            return adoption.load(lambda: self.inner(state_dict, *args, **kwargs))
        if (name := adoption.refuses_load(self.module, state_dict, args[0] if args else "")) is not None:
            raise ProtocolError(
                f"load_state_dict() of a module around the adopted one would write parameters such as {name} outside "
                f"update(), while workers of arena {adoption.name!r} read them; call it inside `with pub.update():`, "
                "or call load_state_dict() of the adopted module"
            )
        return self.inner(state_dict, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.module, self.method)  # a pickled module loads without this package


def _shows(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Does it show the memory of this view, as the view does?"""
    here = (tensor.data_ptr(), tensor.shape, tensor.stride()) == (view.data_ptr(), view.shape, view.stride())
    return here and not (tensor.is_conj() or tensor.is_neg())


def _all_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, those too that the arena has not, and tensors that modules have as plain attributes."""
    return [
        (f"{prefix}.{name}" if prefix else name, value)
        for prefix, child in module.named_modules()
        for held in (child._parameters, child._buffers, vars(child))
        for name, value in held.items()
        if isinstance(value, torch.Tensor)
    ]


def _misfit(name: str, problems: list[str]) -> ManifestMismatch:
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ManifestMismatch(
        f"the module to adopt, or adopted, does not fit arena {name!r}: {len(problems)} difference(s). "
        f"Change the module back, or make a new Publisher for it:{lines}"
    )
