"""Does a module fit an arena, and which of its tensors show the arena's memory?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...errors import ManifestMismatch, ProtocolError
from ...memory.arena import Arena
from ...memory.manifest import Key
from ...memory.torch_modes import counts_changes
from ..source.leaf_check import is_wrapper
from ..source.manifest_check import (
    describe_problems,
    dtype_cure,
    elsewhere,
    mismatches,
    overlapping,
    second_names,
    tied_apart,
    without,
)
from ..source.sources import EVERYTHING, collect, not_saved
from ..source.wrappers import modules_in, of_wrappers, respelled, unwrapped, walk


@dataclass(eq=False)
class ModuleCheck:
    """How modules are bound to an arena; finds the tensors of one, and checks them.

    Args:
        arena, name: what they are bound to.
        copies: parameters become private copies too, as buffers are, on the device they are on.
        absent: leaves of the arena that are no tensors of the module.
        prefix: the module's leaves are those below this key path.
    """

    arena: Arena
    name: str
    _: KW_ONLY
    copies: bool = False
    absent: Collection[Key] = ()
    prefix: Key = ()
    # What tensors() has found: buffers in no state_dict(), on the meta device, by leaf.
    empty: dict[Key, torch.Tensor] = field(default_factory=dict, init=False)
    # Keys of the module to leaves, which differ by `prefix` and by the names of wrappers.
    _spelled: dict[Key, Key] = field(default_factory=dict, init=False)
    # A leaf that has another name too, and the id of its tensor.
    _second: dict[Key, tuple[Key, int]] = field(default_factory=dict, init=False)

    @property
    def beside(self) -> frozenset[Key]:
        """Leaves of the arena that are no tensors of the module, those of wrappers included."""
        by_key, prefix = self.arena.manifest.by_key, self.prefix
        outside = {key for key in by_key if key[: len(prefix)] != prefix}
        return frozenset(self.absent) | of_wrappers(by_key) | outside

    def viewed(self, tensor: torch.Tensor) -> bool:
        """Does this tensor show the arena's memory? Else it is a private copy."""
        return not self.copies and isinstance(tensor, nn.Parameter)

    def tensors(self, module: nn.Module) -> dict[Key, torch.Tensor]:
        """The tensors that move with the version, by key. Raises ManifestMismatch when the module does not fit.

        Buffers that are in no state_dict() are the module's own. The first version fills those that are `empty`.
        """
        refuse_max_norm(
            module,
            "but bound weights are read-only. Normalise in the trainer, build the worker's module without max_norm",
        )
        leaves = self.arena.manifest.by_key
        found = collect(module, EVERYTHING, watch=False).tensors
        lazy = [".".join(key) for key, each in found.items() if is_lazy(each)]
        if lazy:
            raise ProtocolError(f"{lazy[0]} is not initialised yet, in a lazy module; run it once before binding it")
        whole = {key: (*self.prefix, *key) for key in found}
        unsaved = {whole[key] for key in not_saved(module) if key in whole}
        unsaved |= {key for key, leaf in leaves.items() if not leaf.saved}
        saved, tensors = without(leaves, unsaved), without({whole[k]: tensor for k, tensor in found.items()}, unsaved)
        others = respelled(tensors, saved)
        spelled = {key: others.get(each, each) for key, each in whole.items()}
        module_key = {leaf: key for key, leaf in spelled.items()}
        tensors = {others.get(key, key): tensor for key, tensor in tensors.items()}
        second = second_names(tensors, saved)
        for key, (leaf, known) in self._second.items():  # private copies of one tensor do not share memory any more
            if key in tensors and id(tensors[key]) == known:
                second.setdefault(key, leaf)
        own = without(tensors, second)
        if self.arena.manifest.filtered:
            own = {key: tensor for key, tensor in own.items() if key in saved}
        empty = {leaf: found[key] for key, leaf in spelled.items() if leaf in unsaved and leaf in leaves}
        self.empty = {leaf: tensor for leaf, tensor in empty.items() if tensor.is_meta}
        self.check(own | self.empty, unsaved)
        self._second = {key: (leaf, id(tensors[key])) for key, leaf in second.items()}
        self._spelled = spelled
        return {module_key[key]: tensor for key, tensor in (own | {key: tensors[key] for key in second}).items()}

    def refuse_views(self, module: nn.Module, moved: Mapping[Key, torch.Tensor]) -> None:
        """Raise ManifestMismatch for a tensor of the module that shares memory with one that moves away from it."""
        moving = {id(tensor) for tensor in moved.values()}
        found = {".".join(key): each for key, each in collect(module, EVERYTHING, watch=False).tensors.items()}
        for one, two in overlapping(found, moving):
            if (id(found[one]) in moving) != (id(found[two]) in moving):
                view, parameter = (two, one) if id(found[one]) in moving else (one, two)
                raise ManifestMismatch(
                    f"{view} is a view of {parameter}, which moves with each version, while the "
                    "view would keep old values; nothing was changed. Take the view in forward(), or register the "
                    "buffer with persistent=True, which publishes it"
                )

    def leaf_of(self, key: Key) -> Key:
        """The leaf that a tensor of the module shows: that of its own key, or of the tensor which it is tied to."""
        leaf = self._spelled[key]
        return self._second[leaf][0] if leaf in self._second else leaf

    def check(self, tensors: Mapping[Key, torch.Tensor], unsaved: Collection[Key] = ()) -> None:
        """Raise ManifestMismatch when these tensors cannot show what the arena has under their keys.

        `unsaved`: keys that need no tensor.
        """
        arena = self.arena
        meta = {key: t for key, t in tensors.items() if t.device.type == "meta" and not is_wrapper(t)}
        proxies = {key: torch.empty_like(t, device="cpu") for key, t in meta.items()}
        others = {key: view for key, view in arena.views(0).items() if key in self.beside or key in unsaved}
        given = {**others, **tensors, **proxies}
        problems = mismatches(given, arena, partial=False, any_device=True, source_is="module")
        if not self.copies:
            problems += [f"{each}; move it there, or use bind_copies()" for each in elsewhere(tensors, arena)]
        problems = problems or tied_apart(tensors, arena, "module")
        if problems:
            cure = dtype_cure(given, arena, problems)
            raise ManifestMismatch(describe_problems(problems, f"arena {self.name!r}", "the module to bind") + cure)


def bindable(module: nn.Module) -> nn.Module:
    """The module whose tensors are bound: that inside a wrapper, such as torch.compile's."""
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        several = "; put several modules into one torch.nn.ModuleDict({...})" if isinstance(module, dict) else ""
        raise TypeError(f"bind() takes an eager torch.nn.Module, not a {type(module).__name__}{several}")
    return unwrapped(module)


def placed_modules(module: nn.Module) -> list[tuple[Key, nn.Module]]:
    """Each module in the tree of this one, with the key path of its tensors; wrappers, with that of what they wrap."""
    return [(place.path, each) for place in walk(module) for each in (*place.wrappers, place.module)]


def materialise(module: nn.Module, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give ordinary memory to those of the tensors that are on the meta device, or were made in inference mode.

    `.data` cannot change a tensor's device. With ordinary memory in a tensor that was made in inference mode, torch
    would take it for an ordinary one and miss the counter of its changes. The Python objects stay, with their class and
    attributes, so whatever else holds them has the memory too. Call it inside plainly(). Raises ProtocolError for a
    tensor that torch cannot give memory to; nothing was changed then.
    """
    without = {id(each): each for each in tensors if each.device.type == "meta" or not counts_changes(each)}
    if not without:
        return
    recurrent = [each for each in modules_in(module) if isinstance(each, nn.RNNBase)]
    memories = [(tensor, _memory_for(tensor, device)) for tensor in without.values()]
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    for each in recurrent:  # torch swaps no tensor with weak references; RNNBase._apply() drops its own in this way too
        each._flat_weights, each._flat_weight_refs = [], []
    try:
        for tensor, memory in memories:
            torch.utils.swap_tensors(tensor, memory)
            done.append((tensor, memory))
    except RuntimeError as error:
        for swapped in done:
            torch.utils.swap_tensors(*swapped)
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        name = next(name for name, each in named if each is tensor)
        meta = tensor.device.type == "meta"
        what = "is on the meta device" if meta else "was made in inference mode"
        cure = f"Make the module on {device}: its values need not be set" if meta else (
            "Make the module outside of torch.inference_mode(); its calls may be inside"
        )  # fmt: skip
        raise ProtocolError(
            f"{name} {what} and cannot be given other memory, since something else refers to it, such as a weak "
            f"reference or a tensor that was computed from it ({error}); nothing was changed. {cure}"
        ) from error
    finally:
        for each in recurrent:
            each._init_flat_weights()


def _memory_for(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    memory = torch.empty_like(tensor, device=device) if tensor.device.type == "meta" else tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    memory.__class__ = tensor.__class__  # a swap exchanges these two as well
    memory.__dict__.update(tensor.__dict__)
    return memory


def refuse_max_norm(module: nn.Module, otherwise: str) -> None:
    """Raise ProtocolError for an embedding whose forward writes its weight. `otherwise`: why not, and the cure."""
    for child in modules_in(module):
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            name = next(name for name, each in module.named_modules() if each is child)
            raise ProtocolError(
                f"{name or 'the module'} is an embedding with max_norm={child.max_norm}: its forward writes its weight "
                + otherwise
            )
