"""A collector without worker processes: an update goes into its policy in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....engine.source.dtypes import Dtypes
from ....errors import ManifestMismatch
from ....schemes.strategy import WeightStrategy
from .. import extra_state
from .first_weights import resolve
from .own_weights import UNCHANGED, OwnWeights, Wanted


class InProcess:
    """Applies updates to the model of a collector of one process. `dtype` and `strict` are the scheme's."""

    def __init__(self, dtype: Dtypes, strict: bool) -> None:
        self._dtype, self._strict = dtype, strict
        self._own = OwnWeights()

    def apply(self, context: Any, model_id: str, weights: Any) -> None:
        """Apply weights to the context's model; None: the trainer's own policy, if it has changed."""
        target = resolve(context, model_id)
        own = getattr(context, "_orig_policy", None) if model_id == "policy" else target
        if weights is None and own is None:
            return
        wanted = [Wanted(weights, {0}, own)]
        chosen = list(self._own.chosen(wanted, lambda weights: weights))
        for source, _ in chosen:
            if source is not target and source is not UNCHANGED:
                self._apply_to(target, source)
        if own is not target:
            self._own.sent(wanted, chosen)

    def _apply_to(self, target: Any, source: Any) -> None:
        tensors, states = extra_state.separate(source)
        whole, given = extra_state.flat(target), extra_state.flat(tensors)  # given may be partial
        keyed = extra_state.by_key(states or {})
        if not self._strict and isinstance(target, nn.Module) and whole.keys() & given.keys():
            given = {key: tensor for key, tensor in given.items() if key in whole}
            known = extra_state.by_key(extra_state.separate(target)[1] or {})
            keyed = {key: state for key, state in keyed.items() if key in known}
        if self._dtype is not None:  # a policy whose weights are cast has the dtypes that they are cast to
            given = {key: _cast_like(whole[key], leaf) if key in whole else leaf for key, leaf in given.items()}
        try:
            WeightStrategy().apply_weights(target, {**whole, **given, **keyed})
        except ManifestMismatch as error:
            raise ManifestMismatch(
                f"{error}. ShmWeightSyncScheme(strict=False) leaves out what is unexpected, dtype= casts"
            ) from error


def _cast_like(target: Any, leaf: Any) -> Any:
    both = isinstance(target, torch.Tensor) and isinstance(leaf, torch.Tensor)
    return leaf.to(target.dtype) if both and target.is_floating_point() and leaf.is_floating_point() else leaf
