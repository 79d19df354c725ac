"""load_state_dict() on a bound module: a typed error, before it writes into the arena's read-only memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import ProtocolError
from .guard import StandIn


class Loading(StandIn):
    """Stands in for `load_state_dict()` of a module, or for the part of it that writes the module's own tensors.

    Args:
        shows: the dotted names of the tensors below the module that show the arena now.
    """

    def __init__(self, module: nn.Module, name: str, shows: Callable[[nn.Module], set[str]]) -> None:
        self._shows = shows
        super().__init__(module, name)

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what does not lie in an arena; raise ProtocolError for the rest."""
        prefix = args[0] if self.method == "_load_from_state_dict" else ""
        refused = sorted(name for name in self._shows(self.module) if prefix + name in state_dict)
        if refused:
            raise ProtocolError(
                f"load_state_dict() would write {len(refused)} tensor(s) of a bound module, such as "
                f"{prefix + refused[0]}: they show the arena, which is read-only here. Load into the trainer's module "
                "and publish it, or load into copy.deepcopy(module)"
            )
        return self.inner(state_dict, *args, **kwargs)
