"""partial=True without an arena that keeps the values: everything that was sent, for who gets all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from ..engine.outcome import Outcome
from ..engine.source.manifest_check import identity
from ..memory.manifest import tie
from ..memory.torch_modes import run_plainly
from . import extra_state
from .strategy import leaves_of, refuse_odd

Leaves = dict[str, Any]  # by dotted key: private copies, and what modules keep beside their tensors


class SentLeaves:
    """The newest value of each leaf of one model that was ever sent."""

    def __init__(self) -> None:
        self.whole: Leaves = {}
        self._before: Leaves = {}

    def with_part(self, given: Leaves) -> Leaves:
        """All leaves once these are sent; a leaf that was one tensor with one of them changes too."""
        return {**self.whole, **tied_along(self.whole, given), **given}

    def accept(self, whole: Leaves) -> None:
        """What with_part() gave is sent."""
        self._before, self.whole = self.whole, whole

    def settle(self, outcome: Outcome) -> None:
        """The last send is over. What every worker that answered has refused is taken back."""
        if outcome.failed and not outcome.done:
            self.whole = self._before
        self._before = self.whole


@run_plainly
def private_leaves(weights: Any) -> Leaves:
    """Copies that the trainer's next step does not change; tied leaves share one. Raises ValueError for no weights."""
    if not isinstance(weights, (TensorDictBase, Mapping)):
        kind = type(weights).__name__
        raise ValueError(f"with partial=True weights are a module, a TensorDict or a dict, not a {kind}")
    tensors, extra = leaves_of(weights)
    refuse_odd({key: each for key, each in tensors.items() if isinstance(each, torch.Tensor)})
    copies: dict[Any, torch.Tensor] = {}
    found: Leaves = {}
    for key, each in tensors.items():
        if isinstance(each, torch.Tensor):
            identity = tie(each) or key
            each = copies[identity] = copies[identity] if identity in copies else each.detach().clone()
        found[".".join(key)] = each
    return found | {".".join((*path, extra_state.STATE_DICT_KEY)): state for path, state in extra.items()}


def tied_along(whole: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What else of `whole` changes with what is given: the leaves that are one tensor with one of those names."""
    new = {identity(each): given[name] for name, each in whole.items() if name in given and torch.is_tensor(each)}
    return {
        name: new[identity(each)]
        for name, each in whole.items()
        if name not in given and torch.is_tensor(each) and identity(each) in new
    }
