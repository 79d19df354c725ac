"""Adoption: a module's parameters become the slab itself, and stay it whatever the trainer makes of the module."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ... import _native
from ...errors import ProtocolError
from ...memory.arena import Arena, lies_in, readonly_ranges
from ...memory.devices import assign, laid_out
from ...memory.manifest import Key
from ...memory.strides import same_order
from ...memory.torch_modes import plainly, run_plainly
from ..bind.guard import Proxy
from ..bind.replaced_methods import unguarded_loads, would_be_written
from ..source.manifest_check import same_layout
from ..source.overlaps import shown_by_others
from ..source.sources import Filter, collect
from ..source.wrappers import modules_in
from .adoptable import Parts, misfit, parts_of
from .adopted_buffers import AdoptedBuffers
from .optimizer_hooks import OptimizerWatch, StepGate, laid, states_follow, stepped_by, stuck_states

R = TypeVar("R")

_living: weakref.WeakSet[Adoption] = weakref.WeakSet()


class Adoption:
    """The module whose parameters are views of the slab.

    Its tensors are followed by name. Buffers stay private, but for one that shows a parameter's memory: it goes where
    the parameter goes.

    Args:
        module: to adopt; nothing is changed before move_in().
        tensors: those of its tensors that the arena has.
        arena, name: whose only slot becomes its memory.
        filter: which of its leaves the arena has.
        optimizers: that step it inside update().

    Raises ManifestMismatch for a module, ValueError for an optimizer, ProtocolError for a use of them that does not
    allow it.
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: Mapping[Key, torch.Tensor],
        arena: Arena,
        name: str,
        filter: Filter,
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        self.module = module
        self.gates: list[StepGate] = []
        self._arena, self.name, self._filter = arena, name, filter
        self._views = arena.views(0, writable=True)
        self._placed: dict[Key, torch.Tensor] = {}  # what was put at its place in the slab
        self._beside: list[torch.Tensor] = []  # no leaves, but memory of a placed tensor
        self.buffers = AdoptedBuffers(arena, self._views)
        self._seen: _native.Sources | None = None  # None: look at everything each time
        self._pending: Parts | None = None
        self._watch = OptimizerWatch(self._placed)
        self.inside: Callable[[], bool] = lambda: False  # may the calling thread write the parameters?
        self.load_inside: Callable[[Callable[[], Any]], Any] = lambda run: run()  # calls what loads, inside update()
        self._loading: list[AdoptedLoading] = []
        self._versions: list[int] = []  # the parameters' _version when the last update() ended
        self._warned = False
        self._refuse_shared(tensors)
        # As the module is now, with these optimizers of it.
        self._parts = functools.partial(parts_of, module, arena, name, filter)
        self._pending = self._parts(optimizers)

    def move_in(self) -> None:
        """Let the parameters be the slab. Call it when the arena has their values."""
        self.pull(copy=False)
        self.written()
        _living.add(self)

    def written(self) -> None:
        """An update() has ended: a later write into a parameter is a stray one, until the next."""
        self._versions = self._written_versions()

    def warn_of_stray_writes(self) -> None:
        """Warn, once, of a parameter that torch has written since the last update()."""
        if self._warned or (versions := self._written_versions()) == self._versions:
            return
        self._warned, pairs = True, zip(self._placed, versions, self._versions, strict=False)
        names = ", ".join(".".join(key) for key, now, before in pairs if now != before)
        warnings.warn(
            f"{names} of the adopted module was written outside update(): workers of arena {self.name!r} may have read "
            "it half written. Write inside `with pub.update():`",
            stacklevel=2,
        )

    def _written_versions(self) -> list[int]:
        try:
            return [tensor._version for tensor in self._placed.values()]
        except RuntimeError:  # inference tensors have no version counters
            return []

    def _refuse_shared(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        readonly = readonly_ranges()
        theirs = {id(t): other.name for other in _living for t in other._placed.values()}
        for key, tensor in tensors.items():
            if id(tensor) in theirs:
                raise ProtocolError(
                    f"{'.'.join(key)} is adopted by arena {theirs[id(tensor)]!r} already, and can be one arena's "
                    f"memory only; close that Publisher first, or publish() the module to {self.name!r}"
                )
            if isinstance(tensor, nn.Parameter) and lies_in(tensor, readonly):
                raise ProtocolError(
                    f"{'.'.join(key)} shows weights of an arena: the module is bound to a Subscriber, whose weights "
                    "are read-only; adopt the trainer's own module"
                )

    def look(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """See which tensors the module has now; pull() brings new ones into the slab. `optimizer`: is about to step.

        Raises ManifestMismatch for tensors that do not fit, ProtocolError for an optimizer of a parameter that is gone,
        and while a tensor outside the module shows what would be overwritten; nothing is changed then.
        """
        # revalidate() takes over what has moved, so nothing is known any more if what has moved is refused.
        seen, self._seen = self._seen, None
        if self._pending is None and seen is not None and seen.revalidate() and not seen.moved:
            self._seen = seen
            if self.buffers.unchanged():
                if optimizer is not None:
                    self._watch.refuse_orphans(optimizer, self._placed)
                return
        parts = self._parts(self._optimizers())
        self._watch.replaced((key, old) for key, old in self._placed.items() if parts.placed.get(key) is not old)
        if optimizer is not None:
            self._watch.refuse_orphans(optimizer, parts.placed)
        self._clear_places(parts)
        self._pending = parts

    def _clear_places(self, parts: Parts) -> None:
        """Give private memory to the tensors of this adoption whose places are to be overwritten."""
        if not (away := self._away(parts.placed)):
            return
        gone = [each for _, ref in self._watch.orphans if (each := ref()) is not None]
        leaving = [*gone, *self._beside, *(parts.placed[key] for key in away)]
        staying = {id(tensor): tensor for key, tensor in parts.placed.items() if key not in away}
        views = list(self._views.values())
        # Torch counts the tensors over the slab, and does not say which part each of them shows.
        if shown_by_others([*views, *staying.values(), *leaving], views):
            raise ProtocolError(
                f"{', '.join(sorted(map('.'.join, away)))} of the adopted module would overwrite memory of arena "
                f"{self.name!r} while a tensor outside the module shows the arena: a view, a backup `p.data`, or what "
                "swap_tensors() took out. Delete it, or keep its clone() instead, then repeat the call"
            )
        places = {self._views[key].data_ptr() for key in away}
        with plainly():
            for tensor in leaving:
                if id(tensor) not in staying and tensor.data_ptr() in places:
                    tensor.data = tensor.data.clone()

    def _away(self, placed: dict[Key, torch.Tensor]) -> set[Key]:
        """Those that are not at their place, as it is laid out."""
        by_key = self._arena.manifest.by_key
        return {
            key
            for key, tensor in placed.items()
            if tensor.data_ptr() != self._views[key].data_ptr() or not same_layout(tensor, by_key[key])
        }

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ValueError for one of another module, ManifestMismatch for one whose state cannot follow."""
        if not optimizers:
            return
        own = {id(tensor) for tensor in collect(self.module, self._filter, watch=False).tensors.values()}
        for optimizer in optimizers:
            stepped = stepped_by(optimizer)
            if not any(id(tensor) in own for tensor in stepped):
                raise ValueError(
                    f"the optimizer steps {len(stepped)} parameter(s), none of them of the module to adopt; pass the "
                    "optimizer of this module"
                )
            if stuck := stuck_states(optimizer, laid(self._placed.values())):
                raise misfit(self.name, stuck)

    def step_through(self, gates: Iterable[StepGate]) -> None:
        """These gates, whose optimizers were checked, lead to this adoption."""
        self.gates += [gate for gate in gates if gate not in self.gates]
        self.watch_optimizer()
        for optimizer in self._optimizers():
            states_follow(optimizer, self._placed.values())

    def load_through(self, inside: Callable[[], bool], load_inside: Callable[[Callable[[], Any]], Any]) -> None:
        """Lead load_state_dict() of the module, and of all in it, into update(); refuse steps that go past it.

        Args:
            inside: may the calling thread write the parameters: is it in update(), or the arena closed?
            load_inside: calls what loads, inside update(), with private copies to write into.
        """
        self.inside, self.load_inside = inside, load_inside
        self._watch.refuse_outside(inside, lambda: self._optimizers())

    def load(self, run: Callable[[], R], written: Callable[[], object]) -> R:
        """What run(), which loads into the module, returns; inside update().

        It loads into private copies, which go into the slab when it has succeeded: torch writes what fits before it
        raises for the rest. `written` is called before the first byte goes there.
        """
        views = {view.data_ptr(): view for view in self._views.values() if view.nbytes}
        with plainly():
            shown = [tensor for tensor in (*self._placed.values(), *self._beside) if tensor.data_ptr() in views]
            made = {address: views[address].clone() for address in {tensor.data_ptr() for tensor in shown}}
            loads = [(tensor, views[tensor.data_ptr()], made[tensor.data_ptr()]) for tensor in shown]
        try:
            with plainly():
                _native.set_data(shown, [copy for _, _, copy in loads])
            result = run()
        finally:
            with plainly():
                there = [(tensor, view, copy) for tensor, view, copy in loads if tensor.data_ptr() == copy.data_ptr()]
                _native.set_data([tensor for tensor, _, _ in there], [view for _, view, _ in there])
        self.look()  # what was replaced may not fit
        own = {id(tensor) for tensor in self.module.parameters()}
        written()
        with plainly():
            for view, copy in {id(v): (v, c) for tensor, v, c in there if id(tensor) in own}.values():
                assign(view, copy)
        return result

    def watch_optimizer(self) -> None:
        """An update() has begun or ended: steps are right inside it only."""
        for gate in self.gates:
            gate.mind()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for gate in self.gates if (optimizer := gate.optimizer()) is not None]

    @property
    def moves(self) -> bool:
        """Will pull() bring anything into the slab?"""
        return self._pending is not None

    def pull(self, *, copy: bool = True) -> list[torch.Tensor]:
        """Bring what look() found into the slab; only while readers are kept out.

        Returns the memory that its tensors had: plans made before may still read it.
        """
        parts, self._pending = self._pending, None
        if parts is None:
            return []
        self._seen = None  # an interrupt may land anywhere: look at everything again
        with plainly():
            moving = [(parts.placed[key], self._views[key]) for key in self._away(parts.placed)]
            for tensor, view in moving:
                if copy:
                    assign(view, tensor)
            moving += [(tensor, self._views[key]) for tensor, key in parts.beside]
            left = [tensor.data for tensor, _ in moving]
            restrided = not all(same_order(view.shape, tensor.stride(), view.stride()) for tensor, view in moving)
            _native.set_data([tensor for tensor, _ in moving], [view for _, view in moving])
            for tensor, _ in moving:
                grad = tensor.grad
                if grad is not None and grad.layout is torch.strided and (strides := tensor.stride()) != grad.stride():
                    grad.data = laid_out(grad.data, strides)
        self._placed.clear()
        self._placed.update(parts.placed)
        self._beside = [tensor for tensor, _ in parts.beside]
        if restrided:
            self._watch.changed()
            for optimizer in self._optimizers():
                states_follow(optimizer, self._placed.values())
        watched = self.buffers.remember(parts)
        if watched is not None:
            self._seen = _native.Sources(watched, [(tensor, 0, 0) for tensor in self._placed.values()])
        for child, name in unguarded_loads(modules_in(self.module)):
            self._loading.append(AdoptedLoading(child, name, self))
        return left

    @run_plainly
    def restore(self) -> None:
        """Make the parameters private again, with the values they have; what was one memory stays one."""
        _living.discard(self)
        self._watch.close()
        while self._loading:
            self._loading[-1].remove()
            self._loading.pop()
        for gate in self.gates:
            gate.leave(self)
        copies: dict[int, torch.Tensor] = {}
        views = {view.data_ptr(): view for view in self._views.values()}
        for tensor in (*self._placed.values(), *self._beside):
            address = tensor.data_ptr()
            if address in views and tensor.numel():
                if address not in copies:
                    copies[address] = views[address].clone()
                tensor.data = copies[address]


class AdoptedLoading(Proxy):
    """Replaces `load_state_dict()` of an adopted module, or the part that writes the module's own tensors.

    That part is called alone when a module is loaded that has the adopted one inside. So it is a version, or a typed
    error.
    """

    def __init__(self, module: nn.Module, name: str, adoption: Adoption) -> None:
        self.adoption = adoption
        super().__init__(module, name, shows_as=False)

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load inside update(), which publishes; raise ProtocolError for the part alone."""
        adoption = self.adoption
        if self.method == "load_state_dict":
            return adoption.load_inside(lambda: self.inner(state_dict, *args, **kwargs))
        if not adoption.inside():
            prefix, placed = args[0] if args else "", {id(tensor) for tensor in adoption._placed.values()}
            written = would_be_written(state_dict, prefix, self.module._parameters.items(), placed)
            if written:
                raise ProtocolError(
                    f"load_state_dict() of a module around the adopted one would write {len(written)} parameter(s), "
                    f"such as {written[0]}, outside update(), while workers of arena {adoption.name!r} read "
                    "them; call it inside `with pub.update():`, or call load_state_dict() of the adopted module"
                )
        return self.inner(state_dict, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.module, self.method)  # a pickled module loads without this package
