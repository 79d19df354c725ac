"""The trainer's own weights of one model: what update_policy_weights_() sends when it is given none.

TorchRL's schemes make the trainer's policy and the workers' one memory, so there the last write counts: an update with
weights, or one to the policy. Here they are apart. After an update with other weights, one without sends the policy
only if it has changed since. That is decided by its bytes, against a copy made when the other weights were sent: the
counters of tensors miss writes through .data and through NumPy. Without an update with other weights there is no copy
and no comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from ....engine.source.manifest_check import same_bytes
from ....memory.manifest import tie
from ....memory.torch_modes import run_plainly
from .. import extra_state

UNCHANGED: Any = object()  # in the place of weights: a version with those that the workers have


class Wanted(NamedTuple):
    """What an update is to send to these workers."""

    weights: Any  # None: the own ones if they have changed since the last send, else those that the workers have
    workers: set[int]
    own: Any  # the trainer's own weights for these workers
    key: object = None  # the same for the same own weights at each send


class OwnWeights:
    """Which workers have other weights than the trainer's own, and what those were when the others were sent.

    Not thread-safe: call it while you hold the lock of the send.
    """

    def __init__(self) -> None:
        self._seen: dict[object, _Compared] = {}

    def chosen(self, wanted: Sequence[Wanted], prepare: Callable[[Any], Any]) -> Iterator[tuple[Any, set[int]]]:
        """What to publish for which workers; UNCHANGED for those that keep what they have.

        `prepare` makes what is published of weights.
        """
        for weights, workers, own, key in wanted:
            keeping: set[int] = set()
            if weights is None:
                keeping = self._keeping(workers, own, key)
                weights = own
            if workers - keeping:
                yield prepare(weights), workers - keeping
            if keeping:
                yield UNCHANGED, keeping

    def sent(self, wanted: Sequence[Wanted], chosen: Sequence[tuple[Any, set[int]]]) -> None:
        """Take note of a send that was published: what was wanted, and what chosen() made of it."""
        keeping = {worker for weights, workers in chosen if weights is UNCHANGED for worker in workers}
        for weights, workers, own, key in wanted:
            values = None if weights is None or weights is own else _values(own)
            if values is None or _is_part_of(weights, values):
                self._have_own(key, workers - keeping)
            else:
                self._seen.setdefault(key, _Compared()).look(values, workers)

    def _keeping(self, workers: set[int], own: Any, key: object) -> set[int]:
        seen = self._seen.get(key)
        if seen is None or not workers & seen.workers or seen.differs(_values(own)):
            return set()
        return workers & seen.workers

    def _have_own(self, key: object, workers: set[int]) -> None:
        seen = self._seen.get(key)
        if seen is not None:
            seen.workers -= workers
            if not seen.workers:
                del self._seen[key]  # and the copy with it


class _Compared:
    """The values that the own weights had when other ones were last sent, and the workers that have such others."""

    def __init__(self) -> None:
        self.workers: set[int] = set()
        self._values: dict[str, torch.Tensor] = {}

    def look(self, values: dict[str, torch.Tensor], workers: set[int]) -> None:
        """Other weights went to these workers, while the own ones have these values."""
        others = self.workers - workers
        if others and self.differs(values):
            others = set()  # for them the own weights have changed since
        self.workers = others | workers
        self._copy(values)

    @run_plainly
    def differs(self, values: dict[str, torch.Tensor]) -> bool:
        """Are these other values, bit for bit, than those that were seen?"""
        seen = self._values
        return values.keys() != seen.keys() or any(
            tensor.dtype != seen[key].dtype or tensor.shape != seen[key].shape or not same_bytes(tensor, seen[key])
            for key, tensor in values.items()
        )

    @run_plainly
    def _copy(self, values: dict[str, torch.Tensor]) -> None:
        if _kinds(values) == _kinds(self._values):  # into the same memory
            if values:
                torch._foreach_copy_(list(self._values.values()), list(values.values()))
        else:
            self._values = {key: tensor.detach().clone() for key, tensor in values.items()}


def _kinds(values: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(key, tensor.shape, tensor.dtype, tensor.device) for key, tensor in values.items()]


def _values(weights: Any) -> dict[str, torch.Tensor]:
    """The tensors by dotted key; extra state is one of them."""
    tensors, states = extra_state.separate(weights)
    return extra_state.flat(tensors) if states is None else extra_state.together(tensors, states)


def _is_part_of(weights: Any, values: dict[str, torch.Tensor]) -> bool:
    """Are these weights tensors of the own ones, as in TensorDict.from_module(policy) or a wrapper of the policy?"""
    first = next(tensors_of(weights), None)
    if first is not None and first.data_ptr() not in {tensor.data_ptr() for tensor in values.values()}:
        return False  # as nearly always
    tensors = weights if isinstance(weights, nn.Module) else extra_state.separate(weights)[0]
    given = [tensor for tensor in extra_state.flat(tensors).values() if isinstance(tensor, torch.Tensor)]
    places = {tie(tensor) for tensor in values.values()}
    return bool(given) and all(tie(tensor) in places for tensor in given)


def tensors_of(weights: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module, a TensorDict or a flat mapping; none in other weights."""
    if isinstance(weights, nn.Module):
        yield from weights.parameters()
        yield from weights.buffers()
    elif isinstance(weights, (TensorDictBase, Mapping)):
        values: Iterable[Any] = weights.values(True, True) if isinstance(weights, TensorDictBase) else weights.values()
        yield from (value for value in values if isinstance(value, torch.Tensor))
