"""The plans that a publisher keeps, and how the plan of a source is found again.

A module's plan is found by the module, and stays good while its dicts hold the same tensors. One for weights that are
created for each publish is found by their keys, and by what their tensors are like.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...memory.arena import Arena
from ...memory.torch_modes import run_plainly
from ..by_identity import ByIdentity
from ..source.leaf_check import is_tensordict
from ..source.sources import EVERYTHING, Collected, Filter, Weights, collect, not_saved
from ..source.tied import second_names, without
from ..source.wrappers import of_wrappers, respelled
from .copy_plan import CopyPlan
from .source_signature import LEVELS, Seen

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
        # By module, by TensorDict whose plan fits no other source (it has no Outline, see source_signature.py), and by
        # this cache for the publisher's own mapping. A plan holds dicts and tensors of its source, not the source
        # itself: no cycle keeps that alive.
        self._of_objects: ByIdentity[Any, CopyPlan] = ByIdentity()
        self._of_values: list[CopyPlan] = []  # the newest first
        self._taken: CopyPlan | None = None

    def find(self, source: Weights, *, default: bool = False) -> CopyPlan:
        """The kept plan if the source has not changed, else a new one. `default`: it is the publisher's own source."""
        is_module = isinstance(source, nn.Module)
        if type(source) in LEVELS or (not is_module and is_tensordict(source)):
            found = self.find_like(source)
            return self._made_for(source) if found is None else found
        key = source if is_module else self if default else None
        if key is None:
            return self.make(source)
        kept = self._of_objects.get(key)
        if kept is not None and kept.still_valid():
            return kept
        self._of_objects.pop(key)  # it may have addresses by now that were not checked
        made = self._of_objects[key] = self.make(source)
        return made

    def find_like(self, source: Any) -> CopyPlan | None:
        """The kept plan of a TensorDict or dict that was like this one."""
        self.release()
        for plan in self._of_values:
            fits = plan.take(source)
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
        return None

    def _made_for(self, source: Any) -> CopyPlan:
        by_object = is_tensordict(source)
        if by_object and (kept := self._of_objects.get(source)) is not None:
            if kept.still_valid():
                return kept
            self._of_objects.pop(source)
        made = self.make(source, by_value=True)
        made.kind = type(source)
        if made.fits_others:
            self._taken = made
            self._of_values = [made, *self._of_values[: _KEPT - 1]]
        elif by_object:
            self._of_objects[source] = made
        return made

    def release(self) -> None:
        """The plan that find() gave was carried out: keep no weights alive that were made for one publish."""
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.release()

    @run_plainly
    def make(self, source: Weights, *, by_value: bool = False) -> CopyPlan:
        """A new plan. Raises ManifestMismatch when the source does not fit; a module must give every leaf.

        `by_value`: it is for other sources like this one too, if every part of this one is plain.
        """
        partial = not isinstance(source, nn.Module)
        collected = self._collect(source)
        seen = Seen(source, collected.tensors, self._filter, self._arena.manifest) if by_value else None
        return CopyPlan(collected, self._arena, self._name, partial=partial, any_device=self._any_device, seen=seen)

    def _collect(self, source: Weights) -> Collected:
        collected = collect(source, self._filter, self._arena.manifest)
        tensors, known = collected.tensors, self._arena.manifest.by_key
        if isinstance(source, nn.Module):  # buffers that are never saved: an arena made from a state_dict() lacks them
            tensors = without(tensors, not_saved(source).difference(known))
        own = {key for key in tensors if key[-1] == "n_averaged" and key not in known}
        if own:  # as the source spells its keys
            own &= of_wrappers(collect(source, EVERYTHING, watch=False).tensors)
            tensors = without(tensors, own)
        if spelled := respelled(tensors, known):
            tensors = {spelled.get(key, key): each for key, each in tensors.items()}
        return collected._replace(tensors=without(tensors, second_names(tensors, known)))

    def forget(self) -> None:
        """Keep no plan, and so no tensor of a source."""
        self._of_objects.clear()
        self._of_values.clear()
        self._taken = None
