"""Proof of delivery over every transport: a question goes the way of the weights, and is answered as they are.

With checksum=True a sender notes what it has sent to each worker: of each leaf shape, dtype and checksum. verify()
sends that note as a question. The receiver compares it with the model that it would apply weights to at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..engine.outcome import Failure, Outcome, listed
from ..engine.source.sources import not_saved
from ..engine.source.strategy import leaves_of
from ..engine.source.wrappers import of_wrappers, respelled, spelled_in
from ..engine.verify.checksums import checksum_of
from ..engine.verify.compare import Proof
from ..errors import NotDelivered, ProtocolError
from ..memory.torch_modes import run_plainly

_SHOWN = 8  # leaves that an error lists

# By dotted key: shape, dtype and checksum; plain for all pickles.
Question = dict[str, tuple[tuple[int, ...], str, int]]


class Asked(dict[str, Any]):
    """A question, in the place of weights: WeightReceiver.apply_weights() takes it, and answers."""

    stamp: Any = None


class SentSums:
    """What was last sent to each worker."""

    def __init__(self) -> None:
        self._of: dict[Any, Question] = {}

    def note(self, weights: Any, workers: Iterable[Any]) -> None:
        """These weights were sent to these workers; leaves that they lack are as they were."""
        self.take(self.noted(leaves_of(weights)[0], workers))

    @run_plainly
    def noted(self, leaves: Mapping[Any, Any], workers: Iterable[Any]) -> dict[Any, Question]:
        """What note() would keep, for take(), when it is known that they are sent."""
        new: Question = {
            ".".join(key): (tuple(each.shape), str(each.dtype), checksum_of(each))
            for key, each in leaves.items()
            if isinstance(each, torch.Tensor)
        }
        made: dict[int, Question] = {}
        return {worker: made.setdefault(id(old := self._of.get(worker)), {**(old or {}), **new}) for worker in workers}

    def take(self, noted: Mapping[Any, Question]) -> None:
        """Keep what noted() gave."""
        self._of.update(noted)

    def of(self, worker: Any, model_id: str, index: int) -> Question:
        """What to ask this worker. Raises ProtocolError when nothing was sent to it."""
        if worker not in self._of:
            raise ProtocolError(f"no weights of {model_id!r} were sent to worker {index} yet; send() first")
        return self._of[worker]


def refuse_unnoted(scheme: Any) -> None:
    """Raise ProtocolError for a scheme that notes nothing."""
    if not getattr(scheme, "checksum", False):
        raise ProtocolError(
            f"this {type(scheme).__name__} keeps no checksums to verify against; make it with checksum=True"
        )


@run_plainly
def prove(model: Any, question: Mapping[str, Any], model_id: str, *, partial: bool = False) -> None:
    """Compare a model with what was sent. Raises NotDelivered, which names every leaf that differs.

    `partial`: the model may have leaves that were never sent.
    """
    tensors, _ = leaves_of(model)
    wrong: dict[str, str] = {}
    asked = set()
    names = [tuple(name.split(".")) for name in question]
    spelled, own = respelled(names, tensors), of_wrappers(names).difference(tensors)
    for name, (shape, dtype, sum) in question.items():
        key = tuple(name.split("."))
        if key in own:
            continue
        key = key if key in tensors else spelled_in(tensors, key) or spelled.get(key, key)
        asked.add(key)
        tensor = tensors.get(key)
        if not isinstance(tensor, torch.Tensor):
            wrong[name] = "is not there"
        elif (tuple(tensor.shape), str(tensor.dtype)) != (tuple(shape), dtype):
            wrong[name] = f"is {tensor.dtype} {tuple(tensor.shape)} instead of {dtype} {tuple(shape)}"
        elif tensor.device.type == "meta":
            wrong[name] = "is on the meta device: it has no values"
        elif checksum_of(tensor) != sum:
            wrong[name] = "has other values"
    if not partial:
        private = not_saved(model) if isinstance(model, nn.Module) else set()
        known = {tie for key in asked if (tie := _place(tensors.get(key))) is not None}
        for key, tensor in tensors.items():
            if key not in asked and key not in private and _place(tensor) not in known:
                wrong[".".join(key)] = "was never sent"
    if wrong:
        shown = "; ".join(f"{name} {what}" for name, what in list(wrong.items())[:_SHOWN])
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise NotDelivered(
            f"the {type(model).__name__} that this worker has as {model_id!r} is not what was sent: {shown}{more}. "
            "Send again; if that does not help, look who replaces the model or its tensors",
            leaves=wrong,
        )


def judged(outcome: Outcome, model_id: str, version: int, leaves: int) -> Proof:
    """The proof; or the error that names who holds something else, else who is dead or has not answered."""
    outcome.failed = dict(sorted(outcome.failed.items(), key=lambda item: str(item[0])))
    if not outcome.failed:
        outcome.check(f"the question what it holds of {model_id!r}", version)
        return Proof(version, leaves, workers=tuple(sorted(outcome.done)))
    errors = {who: each.exception() for who, each in outcome.failed.items() if isinstance(each, Failure)}
    found = [each for each in errors.values() if isinstance(each, NotDelivered)]
    said = "; ".join(
        f"{listed([who])}: {each.summary if isinstance(each, Failure) else each}"
        for who, each in outcome.failed.items()
    )
    if not found and not any("NotDelivered" in str(each) for each in errors.values()):
        outcome.check(f"the question what it holds of {model_id!r}", version)
    more = [f"dead: {listed(list(outcome.dead))}"] if outcome.dead else []
    more += [f"no answer: {listed(outcome.late)}"] if outcome.late else []
    raise NotDelivered(
        "; ".join([f"version {version} of {model_id!r} was sent, but {said}", *more]),
        version=version,
        missing=[*outcome.failed, *outcome.dead, *outcome.late],
        leaves=dict.fromkeys(leaf for each in found for leaf in each.leaves),
    )


def _place(tensor: Any) -> Any:
    """The same for tied tensors."""
    if not isinstance(tensor, torch.Tensor) or not tensor.numel() or tensor.device.type == "meta":
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
