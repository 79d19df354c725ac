"""The form in which weights travel: out of a model, and into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import nn

from .. import _native
from ..engine.source.dtypes import Dtypes, cast_leaves, check_dtypes, matching_patterns
from ..engine.source.leaf_check import problem_with
from ..engine.source.manifest_check import same_bytes
from ..engine.source.sources import check_keys, collect, not_saved
from ..engine.source.wrappers import respelled, walk
from ..errors import ManifestMismatch
from ..memory.arena import lies_in, nested, readonly_ranges
from ..memory.devices import assign
from ..memory.manifest import Key, tie
from ..memory.torch_modes import counts_changes, run_plainly

Form = Literal["tensordict", "state_dict"]
Leaves = dict[Key, Any]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # from, to
_FORMS = ("tensordict", "state_dict")
STATE_KEY = "_extra_state"  # under which a state_dict() has what get_extra_state() returned


class WeightStrategy:
    """Extracts weights in one form, and applies them in either.

    Args:
        extract_as: "tensordict": nested, zero-copy views of the source. "state_dict": a flat dict of dotted keys.
        partial: weights to apply may lack leaves; only those that are given change.
        dtype: floating parameters are cast to it when they are extracted. A mapping of glob patterns on dotted keys to
            dtypes casts those that match, as Publisher(dtype=) does. The destination has these dtypes.

    Raises ValueError for another name, TypeError and ValueError for what the others cannot be.
    """

    def __init__(self, extract_as: Form = "tensordict", *, partial: bool = False, dtype: Dtypes = None) -> None:
        if extract_as not in _FORMS:
            raise ValueError(f"extract_as is {' or '.join(map(repr, _FORMS))}, not {extract_as!r}")
        if not isinstance(partial, bool):
            raise TypeError(f"partial is True or False, not {partial!r}")
        check_dtypes(dtype)
        self.extract_as, self.partial, self.dtype = extract_as, partial, dtype

    @run_plainly
    def extract_weights(self, source: Any) -> Any:
        """The weights of a module, a TensorDict or a dict, in the configured form.

        They share the source's memory, but for leaves that dtype= casts. Of a module: its parameters and persistent
        buffers, and in the form "state_dict" what get_extra_state() returns; the names are those without the wrappers
        of torch. Raises ValueError for a source of another type, ManifestMismatch for leaves that cannot be sent.
        """
        if self.dtype is None:
            if isinstance(source, Mapping) and not isinstance(source, TensorDictBase) and self.extract_as == _FORMS[1]:
                return source
            if isinstance(source, TensorDictBase) and self.extract_as == _FORMS[0] and not has_dotted_keys(source):
                return source
        leaves, states = leaves_of(source)
        refuse_odd(leaves)
        leaves = self._cast(source, leaves)
        if self.extract_as == "tensordict":
            check_keys(leaves)
            return nested(leaves)
        named = {".".join(key): leaf for key, leaf in leaves.items()}
        return named | {".".join((*path, STATE_KEY)): state for path, state in states.items()}

    def prepared(self, weights: Any) -> Any:
        """Weights in the form that they have, cast to dtype=; a module is extracted."""
        if isinstance(weights, nn.Module):
            return self.extract_weights(weights)
        if self.dtype is None or not isinstance(weights, (TensorDictBase, Mapping)):
            return weights
        form: Form = "tensordict" if isinstance(weights, TensorDictBase) else "state_dict"
        return WeightStrategy(form, partial=self.partial, dtype=self.dtype).extract_weights(weights)

    def _cast(self, source: Any, leaves: Leaves) -> Leaves:
        """These leaves, cast as Publisher(dtype=) casts them; leaves that are one tensor stay one."""
        made: dict[Any, torch.Tensor] = {}
        found = dict(leaves)
        for key, wanted in cast_leaves(source, leaves, self.usable_dtype(leaves)).items():
            leaf = leaves[key]
            identity = tie(leaf) or id(leaf)
            if identity not in made:
                made[identity] = leaf.detach().to(wanted)
            found[key] = made[identity]
        return {key: leaf.detach() for key, leaf in found.items()}

    def usable_dtype(self, leaves: Leaves) -> Dtypes:
        """dtype=, with partial=True without the patterns that match none of these leaves: they may be for others."""
        if not (self.partial and isinstance(self.dtype, Mapping)):
            return self.dtype
        used = set(matching_patterns(leaves, self.dtype).values())
        return {pattern: each for pattern, each in self.dtype.items() if pattern in used} or None

    def apply_weights(self, destination: Any, weights: Any) -> None:
        """Copy weights, of either form, into a module, a TensorDict or a dict, in place; None does nothing.

        All keys, shapes and dtypes are checked first. With partial=True weights may lack leaves, which keep their
        values. Buffers that the weights lack because they are never saved keep theirs; tensors tied in the destination
        stay tied. Devices may differ.

        Raises:
            ManifestMismatch (a ValueError): lists the missing, the unexpected and the mismatched keys; nothing was
                written. ValueError: the destination, or the weights, are of another type.
        """
        if weights is not None:
            write(*self.check_weights(destination, weights))

    @run_plainly
    def check_weights(self, destination: Any, weights: Any) -> tuple[Pairs, list[tuple[nn.Module, Any]]]:
        """What apply_weights() writes: sources with their targets, and modules with their extra state.

        Raises as apply_weights() does for the same destination and weights, and writes nothing.
        """
        if not isinstance(weights, (TensorDictBase, Mapping)):
            raise ValueError(
                f"weights to apply are a TensorDict or a dict, not a {type(weights).__name__}; extract_weights() makes "
                "one of a module"
            )
        if not isinstance(destination, (nn.Module, TensorDictBase, Mapping)):
            raise ValueError(
                f"weights are applied to a torch.nn.Module, a TensorDict or a dict, not to a "
                f"{type(destination).__name__}"
            )
        given, states = leaves_of(weights)
        targets = _by_path(collect(destination, to_write=True))
        unsaved: set[Key] = set()
        modules: dict[Key, nn.Module] = {}  # by the key of their extra state
        if isinstance(destination, nn.Module):
            unsaved = not_saved(destination)
            modules = {(*place.path, STATE_KEY): place.module for place in walk(destination)}
            known = {*targets, *modules}
            given |= {(*path, STATE_KEY): state for path, state in states.items()}
            given = respelled(given, known)
        problems = self._differences(targets, {key: leaf for key, leaf in given.items() if key not in modules}, unsaved)
        if self.partial and targets and not given:
            problems.append("missing: they give no leaf at all")
        if problems:
            why = "; ".join(sorted(problems))
            raise ManifestMismatch(f"the weights do not fit where they should go: {why}. Nothing was written")
        return (
            [(leaf, targets[key]) for key, leaf in given.items() if key in targets],
            [(modules[key], state) for key, state in given.items() if key in modules],
        )

    def _differences(self, targets: Leaves, given: Leaves, unsaved: set[Key]) -> list[str]:
        """Why these leaves cannot be copied into the targets."""
        tied: dict[Any, list[Key]] = {}
        problems = []
        for key, target in targets.items():
            if reason := problem_with(target):
                problems.append(f"mismatched: {'.'.join(key)} {reason}")
            elif any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)):
                problems.append(
                    f"mismatched: {'.'.join(key)} has several elements in one place in memory, as expand() makes them; "
                    "pass its clone()"
                )
            else:
                tied.setdefault(tie(target) or key, []).append(key)
        for keys in tied.values():
            present = [key for key in keys if key in given]
            if not (present or self.partial):
                problems += [f"missing: {'.'.join(key)}" for key in keys if key not in unsaved]
        for key, leaf in given.items():
            name, target = ".".join(key), targets.get(key)
            if target is None:
                problems.append(f"unexpected: {name}")
            elif reason := problem_with(leaf):
                problems.append(f"mismatched: {name} {reason}")
            elif not problem_with(target) and (leaf.shape, leaf.dtype) != (target.shape, target.dtype):
                there, here = f"{target.dtype} {tuple(target.shape)}", f"{leaf.dtype} {tuple(leaf.shape)}"
                problems.append(f"mismatched: {name} is {there} in the destination but {here} in the weights")
        if not problems:
            for first, *others in filter(None, ([key for key in keys if key in given] for keys in tied.values())):
                problems += [
                    f"mismatched: {'.'.join(first)} and {'.'.join(other)} are one tensor in the destination but differ "
                    "in the weights"
                    for other in others
                    if not same_bytes(given[first].cpu(), given[other].cpu())
                ]
        return problems


@run_plainly
def write(pairs: Pairs, states: Iterable[tuple[nn.Module, Any]] = ()) -> None:
    """Copy checked weights, of each pair the first into the second; those in plain memory go in one native call.

    Raises ManifestMismatch, with nothing written, for targets in an arena, as a bound module has them.
    """
    readonly = readonly_ranges()
    if readonly and any(lies_in(target, readonly) for _, target in pairs):
        raise ManifestMismatch(
            "the destination lies in an arena, which is read-only here, as a bound module does; nothing was written. "
            "Publish in the trainer, or apply the weights to a module of your own"
        )
    rows: list[tuple[int, int, int]] = []
    written: list[torch.Tensor] = []
    for source, target in pairs:
        if source.dtype == target.dtype and _is_plain(source) and _is_plain(target):
            rows.append((target.data_ptr(), source.data_ptr(), source.nbytes))
            written.append(target)
        else:
            assign(target, source)
    if rows:
        _native.copy(rows)
        torch.autograd.graph.increment_version(written)  # as copy_() does, for autograd's checks
    for module, state in states:
        module.set_extra_state(state)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)  # others may keep their values elsewhere
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and counts_changes(tensor)
    )


def leaves_of(source: Any) -> tuple[Leaves, dict[Key, Any]]:
    """Tensors by key path, and extra state by the path of its module. Raises ValueError for what has no weights."""
    if isinstance(source, nn.Module):
        left_out = not_saved(source)
        tensors = collect(source)
        return {key: tensor for key, tensor in tensors.items() if key not in left_out}, extra_states(source)
    if not isinstance(source, (TensorDictBase, Mapping)):
        raise ValueError(f"weights are a torch.nn.Module, a TensorDict or a dict, not a {type(source).__name__}")
    states = {}
    if not isinstance(source, TensorDictBase):
        keys = [key for key in source if isinstance(key, str) and key.rpartition(".")[2] == STATE_KEY]
        states = {tuple(key.split("."))[:-1]: source[key] for key in keys}
        source = {key: value for key, value in source.items() if key not in keys} if keys else source
    return _by_path(collect(source)), states


def extra_states(module: nn.Module) -> dict[Key, Any]:
    """What get_extra_state() returns of each module in it that defines that, by path."""
    mine = ((path, each) for path, each in walk(module) if type(each).get_extra_state is not nn.Module.get_extra_state)
    return {path: each.get_extra_state() for path, each in mine}


def _by_path(tensors: Mapping[Key, Any]) -> Leaves:
    """Leaves by key path, with keys that contain dots taken apart."""
    return {tuple(".".join(key).split(".")): value for key, value in tensors.items()}


def has_dotted_keys(weights: TensorDictBase) -> bool:
    """Has it keys such as those of TensorDict(module.state_dict())?"""
    return any("." in key for key in weights.keys())  # noqa: SIM118  # a TensorDict iterates over its batch


def refuse_odd(leaves: Mapping[Key, Any]) -> None:
    """Raise ManifestMismatch for objects that cannot be leaves; before anything is sent."""
    problems = [f"{'.'.join(key)} {reason}" for key, leaf in leaves.items() if (reason := problem_with(leaf))]
    if problems:
        raise ManifestMismatch("these weights cannot be sent: " + "; ".join(problems) + ". Nothing was sent")
