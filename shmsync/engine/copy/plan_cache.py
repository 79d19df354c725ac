"""The plans that a publisher keeps, and how the plan of a source is found again.

A module's plan is found by the module, and stays good while its dicts hold the same tensors. One for weights that are
created for each publish is found by their keys, and by what their tensors are like.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from ...memory.arena import Arena
from ...memory.torch_modes import run_plainly
from ..source.second_names import second_names, without
from ..source.sources import EVERYTHING, Collected, Filter, Weights, collect, not_saved
from ..source.wrappers import of_wrappers, respelled
from .copy_plan import CopyPlan
from .source_signature import MADE_ANEW, Seen

_KEPT = 4  # plans for sources that are new objects each time: a trainer may alternate between all weights and a part


class PlanCache:
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
        self._of_values: list[CopyPlan] = []  # the newest first
        self._taken: CopyPlan | None = None

    def find(self, source: Weights, *, default: bool = False) -> CopyPlan:
        """The kept plan if the source has not changed, else a new one. `default`: it is the publisher's own source."""
        if type(source) in MADE_ANEW or isinstance(source, TensorDictBase):
            return self._find_values(source)
        kept = self._of_default if default else self._of_modules.get(source) if isinstance(source, nn.Module) else None
        if kept is not None and kept.still_valid(self._arena):
            return kept
        if default:
            self._of_default = None  # its addresses may be those of a source that is refused now
        elif isinstance(source, nn.Module):
            self._of_modules.pop(source, None)
        plan = self.make(source)
        if default:
            self._of_default = plan
        elif isinstance(source, nn.Module):
            # The plan holds the module's dicts and tensors, not the module: no cycle keeps the key alive.
            self._of_modules[source] = plan
        return plan

    def _find_values(self, source: Any) -> CopyPlan:
        """The plan for sources like this one, or a new one."""
        self.release()
        for plan in self._of_values:
            fits = plan.take(source, self._arena)
            if fits:
                self._taken = plan
                if self._of_values[0] is not plan:
                    self._of_values.remove(plan)
                    self._of_values.insert(0, plan)
                return plan
            plan.release()
            if fits is None:
                self._of_values.remove(plan)
                break
        collected = functools.cache(lambda: self._collect(source))
        if isinstance(source, TensorDictBase):
            kept = self._of_tensordict.find(source, self._arena, collected)
            if kept is not None:
                return kept
        plan = self.make(source, collected(), by_value=True)
        if plan.fits_others:
            self._taken = plan
            self._of_values = [plan, *self._of_values[: _KEPT - 1]]
        elif isinstance(source, TensorDictBase):
            self._of_tensordict.keep(source, plan)
        return plan

    def release(self) -> None:
        """The plan that find() gave was carried out: keep no weights alive that were made for one publish."""
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.release()

    @run_plainly
    def make(self, source: Weights, collected: Collected | None = None, *, by_value: bool = False) -> CopyPlan:
        """A new plan. Raises ManifestMismatch when the source does not fit; a module must give every leaf.

        `by_value`: it is for other sources like this one too, if every part of this one is plain.
        """
        partial = not isinstance(source, nn.Module)
        collected = collected or self._collect(source)
        seen = Seen(source, collected.tensors, self._filter, self._arena.manifest) if by_value else None
        return CopyPlan(collected, self._arena, self._name, partial=partial, any_device=self._any_device, seen=seen)

    def _collect(self, source: Weights) -> Collected:
        collected = collect(source, self._filter, self._arena.manifest)
        if isinstance(source, nn.Module):
            # Buffers that are never saved: an arena made from a state_dict() lacks them.
            own = {key for key in not_saved(source) if key not in self._arena.manifest.by_key}
            if own:
                kept = {key: tensor for key, tensor in collected.tensors.items() if key not in own}
                collected = collected._replace(tensors=kept)
        own = {key for key in collected.tensors if key[-1] == "n_averaged" and key not in self._arena.manifest.by_key}
        if own:  # as the source spells its keys
            own &= of_wrappers(collect(source, EVERYTHING, watch=False).tensors)
        spelled = respelled([key for key in collected.tensors if key not in own], self._arena.manifest.by_key)
        if spelled or own:
            kept = {spelled.get(key, key): each for key, each in collected.tensors.items() if key not in own}
            collected = collected._replace(tensors=kept)
        second = second_names(collected.tensors, self._arena.manifest.by_key)
        return collected._replace(tensors=without(collected.tensors, second)) if second else collected

    def forget(self) -> None:
        """Keep no plan, and so no tensor of a source."""
        self._of_default = None
        self._of_modules.clear()
        self._of_values.clear()
        self._taken = None
        self._of_tensordict.clear()


class _Recent:
    """The plan for the last TensorDict, good for another one with the same tensors too.

    Each TensorDict.from_module() of a module makes such another one. It keeps no weights alive: when the TensorDict is
    gone, only a plan for a module's parameters stays.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[TensorDictBase] | None = None
        self._plan: CopyPlan | None = None

    def find(self, source: TensorDictBase, arena: Arena, collected: Callable[[], Collected]) -> CopyPlan | None:
        """The kept plan, if it is for these tensors and they have not changed."""
        plan = self._plan
        if plan is None or not plan.still_valid(arena):
            self.clear()  # it has addresses by now that were not checked
            return None
        same = self._source is not None and self._source() is source
        return plan if same or plan.shows(collected().tensors) else None

    def keep(self, source: TensorDictBase, plan: CopyPlan) -> None:
        """Remember the plan of this source, and no other."""
        self.clear()
        self._plan = plan
        self._source = weakref.ref(source, None if plan.has_parameters else self._gone)

    def clear(self) -> None:
        """Forget the plan."""
        self._plan = self._source = None

    def _gone(self, reference: weakref.ref[TensorDictBase]) -> None:
        if self._source is reference:
            self.clear()
