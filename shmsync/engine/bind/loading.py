"""load_state_dict() on a bound module: a typed error, before it writes into the arena's read-only memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ...errors import ProtocolError
from ..source.wrappers import modules_in
from .binding import bound_tensors
from .guard import Proxy


def unguarded_loads(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The methods of a module, and of all in it, that load weights and are not replaced by a proxy yet."""
    for child in modules_in(module):
        for name in ("load_state_dict", "_load_from_state_dict"):
            if not isinstance(child.__dict__.get(name), Proxy) and hasattr(child, name):
                yield child, name


class Loading(Proxy):
    """Replaces `load_state_dict()` of a module, or the part of it that writes the module's own tensors."""

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what does not lie in an arena; raise ProtocolError for the rest."""
        module, prefix = self.module, args[0] if self.method == "_load_from_state_dict" else ""
        shown = bound_tensors(module)
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        names = {prefix + name for name, tensor in named if id(tensor) in shown}
        refused = sorted(name for name in names if name in state_dict)
        if refused:
            raise ProtocolError(
                f"load_state_dict() would write {len(refused)} tensor(s) of a bound module, such as "
                f"{refused[0]}: they show the arena, which is read-only here. Load into the trainer's module "
                "and publish it, or load into copy.deepcopy(module)"
            )
        return self.inner(state_dict, *args, **kwargs)
