"""load_state_dict() on a bound module: a typed error, before it writes into the arena's read-only memory.

On an adopted module: a version, or a typed error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ...errors import ProtocolError
from .binding import companions
from .guard import Proxy


def _written(names: set[str], state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """The keys under which a state_dict has tensors of these names of a module."""
    return sorted(prefix + name for name in names if prefix + name in state_dict)


class Loading(Proxy):
    """Replaces `load_state_dict()` of a module, or the part of it that writes the module's own tensors."""

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what does not lie in an arena; raise ProtocolError for the rest."""
        prefix = args[0] if self.method == "_load_from_state_dict" else ""
        shown = {name for binding in companions(self.module) for name in binding.names_below(self.module)}
        refused = _written(shown, state_dict, prefix)
        if refused:
            raise ProtocolError(
                f"load_state_dict() would write {len(refused)} tensor(s) of a bound module, such as "
                f"{refused[0]}: they show the arena, which is read-only here. Load into the trainer's module "
                "and publish it, or load into copy.deepcopy(module)"
            )
        return self.inner(state_dict, *args, **kwargs)


class Loads(NamedTuple):
    """What load_state_dict() of an adopted module needs of its arena."""

    name: str  # the arena's
    inside: Callable[[], bool]  # may the calling thread write the parameters: is it in update(), or the arena closed?
    load: Callable[[Callable[[], Any]], Any]  # calls what loads, inside update(), with private copies to write into
    placed: Callable[[nn.Module], set[str]]  # the names of a module's own parameters that are the slab


class AdoptedLoading(Proxy):
    """Replaces `load_state_dict()` of an adopted module, or the part that writes the module's own tensors.

    That part is called alone when a module is loaded that has the adopted one inside.
    """

    def __init__(self, module: nn.Module, name: str, loads: Loads) -> None:
        self.loads = loads
        super().__init__(module, name, shows_as=False)

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load inside update(), which publishes; raise ProtocolError for the part alone."""
        loads = self.loads
        if self.method == "load_state_dict":
            return loads.load(lambda: self.inner(state_dict, *args, **kwargs))
        if not loads.inside():
            written = _written(loads.placed(self.module), state_dict, args[0] if args else "")
            if written:
                raise ProtocolError(
                    f"load_state_dict() of a module around the adopted one would write {len(written)} parameter(s), "
                    f"such as {written[0]}, outside update(), while workers of arena {loads.name!r} read "
                    "them; call it inside `with pub.update():`, or call load_state_dict() of the adopted module"
                )
        return self.inner(state_dict, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.module, self.method)  # a pickled module loads without this package
