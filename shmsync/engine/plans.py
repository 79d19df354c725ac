"""Finding the plan of a source again: checking and laying out a source costs more than copying it.

A plan is used again only if nothing about its source changed, which CopyPlan.still_valid() checks each time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from tensordict import TensorDictBase
from torch import nn

from ..memory.arena import Arena
from .copying import CopyPlan
from .sources import Collected, Filter, Weights, collect


class Plans:
    """The plans of one publisher, by source.

    Args:
        arena, name: where they copy to.
        filter: which leaves of a module count.
        any_device: sources may lie on other devices than the arena.
    """

    def __init__(self, arena: Arena, name: str, filter: Filter, *, any_device: bool) -> None:
        self._arena = arena
        self._name = name
        self._filter = filter
        self._any_device = any_device
        self._of_modules: weakref.WeakKeyDictionary[nn.Module, CopyPlan] = weakref.WeakKeyDictionary()
        self._of_default: CopyPlan | None = None
        self._of_tensordict = _Recent()

    def find(self, source: Weights, *, default: bool = False) -> CopyPlan:
        """The plan for this source: the one made before if nothing about it changed. `default`: the publisher keeps
        this source, so its plan is kept too, of whatever type it is."""
        if isinstance(source, TensorDictBase):
            return self._find_tensordict(source)
        kept = self._of_default if default else self._of_modules.get(source) if isinstance(source, nn.Module) else None
        if kept is not None and kept.still_valid(self._arena):
            return kept
        plan = self.make(source)
        if default:
            self._of_default = plan
        elif isinstance(source, nn.Module):
            # The plan holds the module's dicts and tensors, not the module: no cycle keeps the key alive.
            self._of_modules[source] = plan
        return plan

    def _find_tensordict(self, source: TensorDictBase) -> CopyPlan:
        collected = functools.cache(lambda: self._collect(source))
        plan = self._of_tensordict.find(source, self._arena, collected)
        if plan is None:
            plan = self.make(source, collected())
            self._of_tensordict.keep(source, plan)
        return plan

    def make(self, source: Weights, collected: Collected | None = None) -> CopyPlan:
        """A new plan. Raises ManifestMismatch when the source does not fit; a module must give every leaf."""
        partial = not isinstance(source, nn.Module)
        collected = collected or self._collect(source)
        return CopyPlan(collected, self._arena, self._name, partial=partial, any_device=self._any_device)

    def _collect(self, source: Weights) -> Collected:
        return collect(source, self._filter, self._arena.manifest)

    def forget(self) -> None:
        """Keep no plan, and so no tensor of a source."""
        self._of_default = None
        self._of_modules.clear()
        self._of_tensordict.clear()


class _Recent:
    """The plan for the last TensorDict: for the same one again, or for another that shows the same tensors, as each
    TensorDict.from_module() of a module does.

    It keeps no weights alive: without the TensorDict it keeps only a plan for a module's parameters.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[TensorDictBase] | None = None
        self._plan: CopyPlan | None = None

    def find(self, source: TensorDictBase, arena: Arena, collected: Callable[[], Collected]) -> CopyPlan | None:
        """A plan for this source that is still right."""
        plan = self._plan
        if plan is None or not plan.still_valid(arena):
            return None
        same = self._source is not None and self._source() is source
        return plan if same or plan.shows(collected().tensors) else None

    def keep(self, source: TensorDictBase, plan: CopyPlan) -> None:
        """Remember."""
        self.clear()
        self._plan = plan
        self._source = weakref.ref(source, None if plan.has_parameters else self._gone)

    def clear(self) -> None:
        """Forget."""
        self._plan = self._source = None

    def _gone(self, reference: weakref.ref[TensorDictBase]) -> None:
        if self._source is reference:
            self.clear()
