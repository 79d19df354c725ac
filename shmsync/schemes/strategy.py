"""The form in which weights travel: out of a model, and into one."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from .. import _native
from ..engine.source.dtypes import Dtypes, check_dtypes, kept_leaves
from ..engine.source.leaf_check import problem_with
from ..engine.source.manifest_check import same_bytes, without
from ..engine.source.sources import EVERYTHING, check_keys, collect, not_saved
from ..engine.source.wrappers import of_wrappers, respelled, walk
from ..errors import ManifestMismatch
from ..memory.arena import lies_in, nested, readonly_ranges
from ..memory.devices import assign
from ..memory.manifest import Key, tie
from ..memory.torch_modes import counts_changes, run_plainly
from . import extra_state
from .cast_before_send import cast_tensors, cast_weights
from .targets import made_anew, problem_with_target, shared_in_part

Form = Literal["tensordict", "state_dict"]
_FORMS = ("tensordict", "state_dict")


class WeightStrategy:
    """Extracts weights in one form, and applies them in either.

    Args:
        extract_as: "tensordict": nested, zero-copy views of the source. "state_dict": a flat dict of dotted keys.
        partial: weights to apply may lack leaves; only those that are given change.
        dtype: floating parameters are cast to it when they are extracted, and before they are checked and applied. A
            mapping of glob patterns on dotted keys to dtypes casts those that match, as Publisher(dtype=) does.

    Raises ValueError for another name, TypeError and ValueError for what the others cannot be.
    """

    def __init__(self, extract_as: Form = "tensordict", *, partial: bool = False, dtype: Dtypes = None) -> None:
        if extract_as not in _FORMS:
            raise ValueError(f"extract_as is {' or '.join(map(repr, _FORMS))}, not {extract_as!r}")
        if not isinstance(partial, bool):
            raise TypeError(f"partial is True or False, not {partial!r}")
        check_dtypes(dtype)
        self.extract_as = extract_as
        self.partial = partial
        self.dtype = dtype
        self._kept: frozenset[Key] = frozenset()  # buffers of the module that was extracted last

    def __repr__(self) -> str:
        options = ", partial=True" * self.partial + (f", dtype={self.dtype!r}" if self.dtype is not None else "")
        return f"WeightStrategy({self.extract_as!r}{options})"

    def cast(self, weights: Any) -> Any:
        """Weights in the form that they have, cast to dtype=. Raises ManifestMismatch as Publisher(dtype=) does.

        The buffers of the module that was extracted last keep their dtype in every form.
        """
        return cast_weights(weights, self.dtype, partial=self.partial, kept=self._kept)

    @run_plainly
    def extract_weights(self, source: Any) -> Any:
        """The weights of a module, a TensorDict or a dict, in the configured form.

        They share the source's memory, but for leaves that dtype= casts. A module that torch.compile(), DataParallel,
        DDP or AveragedModel wraps gives the keys that it has without the wrapper. Raises ValueError for a source of
        another type.
        """
        extracted = self._extracted(source)
        if isinstance(self.dtype, torch.dtype) and isinstance(source, nn.Module):
            tensors = unflattened(collect(source, EVERYTHING).tensors)
            self._kept = frozenset(kept_leaves(source, tensors))
            extracted = _with_buffers(extracted, self._kept)
        return self.cast(extracted)

    def _extracted(self, source: Any) -> Any:
        if self.extract_as == "state_dict":
            if isinstance(source, nn.Module):
                _values_of(source)
                return state_of(source)
            if isinstance(source, TensorDictBase):
                return {".".join(key): value for key, value in collect(source, EVERYTHING).tensors.items()}
            if isinstance(source, Mapping):
                return source
        else:
            if isinstance(source, nn.Module):
                return nested({key: tensor.data for key, tensor in _values_of(source).items()})
            if isinstance(source, TensorDictBase) and not is_flat(source):
                return source
            if isinstance(source, (TensorDictBase, Mapping)):
                tensors, _ = leaves_of(source)
                check_keys(tensors)
                return nested(tensors)
        raise ValueError(
            f"weights come from a torch.nn.Module, a TensorDict or a dict, not from a {type(source).__name__}"
        )

    def apply_weights(self, destination: Any, weights: Any) -> None:
        """Copy weights, of either form, into a module, a TensorDict or a dict, in place; None does nothing.

        All keys, shapes and dtypes are checked first, after the cast to dtype=. With partial=True weights may lack
        leaves, which keep their values. Buffers that the weights lack because they are never saved keep
        their values; tensors tied in the destination stay tied. Devices may differ.

        Raises:
            ManifestMismatch (a ValueError): lists the missing, the unexpected and the mismatched keys; nothing was
                written. ValueError: the destination, or the weights, are of another type.
        """
        self.apply_checked(self.check_weights(destination, weights))

    def apply_checked(self, fit: Fit) -> None:
        """Copy weights that check_weights() has just found to fit. Raises ManifestMismatch for a bound module's."""
        targets, given, extra = fit
        refuse_bound({key: targets[key] for key in given})
        earlier = [(targets[key].detach().clone(), targets[key]) for key in given] if extra else []
        states = [(module, module.get_extra_state()) for module, _ in extra]
        _copy_all([(source, targets[key]) for key, source in given.items()])
        try:
            for module, state in extra:
                module.set_extra_state(getattr(state, "data", state))
        except BaseException:  # of the user's own code: the destination keeps what it had
            _copy_all(earlier)
            for module, state in states:
                with contextlib.suppress(Exception):
                    module.set_extra_state(state)
            raise

    def check_destination(self, module: nn.Module) -> None:
        """Raise ManifestMismatch if partial=True and the module cannot take a part of its weights alone."""
        problems = shared_in_part(collect(module, EVERYTHING).tensors) if self.partial else []
        if problems:
            why = "; ".join(problems)
            raise ManifestMismatch(f"the module cannot be bound: {why}. Nothing was changed")

    @run_plainly
    def check_weights(self, destination: Any, weights: Any) -> Fit:
        """Raise as apply_weights() does for the same destination and weights, and write nothing."""
        if weights is None:
            return Fit({}, {}, [])
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
        given, extra = leaves_of(weights)
        targets, _ = leaves_of(destination, to_write=True)
        again = leaves_of(destination, to_write=True)[0] if isinstance(destination, TensorDictBase) else targets
        optional: set[Key] = set()
        modules: dict[Key, nn.Module] = {}
        if isinstance(destination, nn.Module):
            optional = not_saved(destination)
            modules = extra_state.submodules(destination)
            given = without(given, of_wrappers(given).difference(targets))
            spelled = respelled(given, targets)
            given = {spelled.get(key, key): value for key, value in given.items()}
            ends = {path: (*path, "") for path in (*extra, *modules)}  # a path is all prefix
            spelled = respelled([ends[path] for path in extra], [ends[path] for path in modules])
            extra = {spelled.get(ends[path], ends[path])[:-1]: state for path, state in extra.items()}
        if self.dtype is not None:
            kept = kept_leaves(destination, targets)
            if not isinstance(destination, nn.Module):  # the sender has cast them already
                kept |= {key for key, each in given.items() if _dtype_of(each) == _dtype_of(targets.get(key))}
            given = cast_tensors(given, self.dtype, partial=self.partial, kept=kept)
        problems = _differences(targets, given, None if self.partial else optional)
        if self.partial:
            problems += [f"mismatched: {problem}" for problem in shared_in_part(targets)]
        if self.partial and targets and not (given or extra):
            problems.append("missing: they give no leaf at all")
        for key, target in targets.items():
            if reason := made_anew(target, again.get(key)):
                problems.append(f"mismatched: {'.'.join(key)} {reason}")
        if modules:
            unknown = [".".join((*path, extra_state.STATE_DICT_KEY)) for path in extra if path not in modules]
            problems += [f"unexpected: {key}" for key in unknown]
        if problems:
            why = "; ".join(problems)
            raise ManifestMismatch(f"the weights do not fit where they should go: {why}. Nothing was written")
        return Fit(targets, given, [(modules[path], state) for path, state in extra.items() if path in modules])


class Fit(NamedTuple):
    """Checked weights: each given leaf has a target of its shape and dtype."""

    targets: dict[Key, Any]
    given: dict[Key, Any]
    extra: list[tuple[nn.Module, Any]]


def refuse_bound(targets: Mapping[Key, torch.Tensor]) -> None:
    """Raise ManifestMismatch for targets that lie in an arena.

    Not part of check_weights(): a caller may give a bound module private memory between the check and the write.
    """
    readonly = readonly_ranges()
    bound = [".".join(key) for key, target in targets.items() if readonly and lies_in(target, readonly)]
    if bound:
        raise ManifestMismatch(
            f"{', '.join(bound)} of the destination lie in an arena, which is read-only here, as in a bound module; "
            "nothing was written. Publish in the trainer, or apply the weights to a module of your own"
        )


@run_plainly
def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the first tensor of each pair into the second; pairs in plain memory go in one native call."""
    rows: list[tuple[torch.Tensor, int, int]] = []
    written: list[torch.Tensor] = []
    for source, target in pairs:
        if _copies_as_bytes(source) and _copies_as_bytes(target):
            if source.numel():
                rows.append((source, target.data_ptr(), target.nbytes))
                written.append(target)
        else:
            assign(target, source)
    if rows:
        _native.Sources([], rows).copy_to(0)  # each to a separate address
        torch.autograd.graph.increment_version(written)  # as copy_() does, for autograd's checks


def _copies_as_bytes(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)  # others may keep their values elsewhere
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and counts_changes(tensor)
    )


def _dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _with_buffers(extracted: Any, buffers: Container[Key]) -> Any:
    """The same weights, in which buffers are known by their type, wherever they are cast."""
    named = collect(extracted, EVERYTHING).tensors if isinstance(extracted, TensorDictBase) else extracted
    found = {}
    for key, value in named.items():
        path = tuple((key if isinstance(key, str) else ".".join(key)).split("."))
        is_buffer = path in buffers and isinstance(value, torch.Tensor)
        found[key] = nn.Buffer(value) if is_buffer else value
    return nested(found) if isinstance(extracted, TensorDictBase) else found


def is_flat(weights: TensorDictBase) -> bool:
    """Does it have dotted keys, as TensorDict(module.state_dict()) has?"""
    return any("." in key for key in weights.keys())  # noqa: SIM118  # a TensorDict iterates over its batch


def _values_of(module: nn.Module) -> dict[Key, torch.Tensor]:
    """The module's tensors. Raises ManifestMismatch if one of them has no values that could be sent."""
    tensors = collect(module, EVERYTHING, watch=False).tensors
    refuse_odd(tensors)
    return tensors


def state_of(module: nn.Module) -> dict[str, Any]:
    """The module's state_dict(), under the keys that it has without wrappers."""
    places = list(walk(module))  # before state_dict(), which is a collective of FSDP
    state: dict[str, Any] = places[0].module.state_dict()
    if not any(place.wrappers for place in places[1:]):
        return state
    keys = {tuple(name.split(".")): name for name in state}
    known = [
        (*place.path, *name.split("."))
        for place in places
        for name in (*place.module._parameters, *place.module._buffers, "_extra_state")
    ]
    spelled, own = respelled(keys, known), of_wrappers(keys)
    return {".".join(spelled.get(key, key)): state[name] for key, name in keys.items() if key not in own}


def refuse_odd(tensors: Mapping[Key, Any]) -> None:
    """Raise ManifestMismatch for objects that cannot be leaves; before anything is sent."""
    problems = [f"{'.'.join(key)} {reason}" for key, tensor in tensors.items() if (reason := problem_with(tensor))]
    if problems:
        raise ManifestMismatch("these weights cannot be sent: " + "; ".join(problems) + ". Nothing was sent")


def leaves_of(
    source: nn.Module | TensorDictBase | Mapping[str, Any], *, to_write: bool = False
) -> tuple[dict[Key, Any], dict[Key, Any]]:
    """Tensors by key path, and extra state by the path of its module. `to_write`: as collect() has it."""
    extra: dict[Key, Any] = {}
    if isinstance(source, Mapping) and not isinstance(source, TensorDictBase):
        keys: list[str] = [key for key in source if isinstance(key, str) and key.rpartition(".")[2] in extra_state.KEYS]
        extra = {tuple(key.split("."))[:-1]: source[key] for key in keys}
        source = {key: value for key, value in source.items() if key not in keys}
    tensors = unflattened(collect(source, EVERYTHING, to_write=to_write).tensors)
    extra |= {key[:-1]: tensors.pop(key) for key in list(tensors) if key[-1] in extra_state.KEYS}
    return tensors, extra


def unflattened(tensors: Mapping[Key, Any]) -> dict[Key, Any]:
    """Leaves by key path, with keys that contain dots taken apart."""
    return {tuple(".".join(key).split(".")): value for key, value in tensors.items()}


def _differences(targets: Mapping[Key, Any], given: Mapping[Key, Any], optional: set[Key] | None) -> list[str]:
    """Why the given leaves cannot be copied into the targets. `optional`: None is all."""
    aliases: dict[Any, list[Key]] = {}
    odd = {key: reason for key, tensor in targets.items() if (reason := problem_with_target(tensor))}
    for key, tensor in targets.items():
        aliases.setdefault(None if key in odd else tie(tensor), []).append(key)
    tied = {key: keys for identity, keys in aliases.items() if identity is not None for key in keys}
    missing = [
        ".".join(key)
        for key in targets
        if optional is not None
        and key not in given
        and key not in optional
        and not any(other in given for other in tied.get(key, ()))
    ]
    unexpected = [".".join(key) for key in given if key not in targets]
    problems = [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in unexpected]
    for key in given.keys() & targets.keys():
        name, source, target = ".".join(key), given[key], targets[key]
        if reason := problem_with(source) or odd.get(key):
            problems.append(f"mismatched: {name} {reason}")
        elif source.shape != target.shape or source.dtype != target.dtype:
            there, here = f"{target.dtype} {tuple(target.shape)}", f"{source.dtype} {tuple(source.shape)}"
            problems.append(f"mismatched: {name} is {there} in the destination but {here} in the weights")
    if problems:
        return sorted(problems)
    for keys in aliases.values():
        first, *others = [key for key in keys if key in given] or [()]
        for other in others:
            if tied.get(first) and not same_bytes(given[first].cpu(), given[other].cpu()):
                one, two = ".".join(first), ".".join(other)
                problems.append(
                    f"mismatched: {one} and {two} are one tensor in the destination but differ in the weights"
                )
    return sorted(problems)
