"""Cover: the read section around each call of a bound module."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from ... import _native
from ...memory.dynamo import disable, skip
from ..read.outputs import private
from ..read.reading import ReadPath


class Cover(_native.Cover):
    """Shared by all guards of a module and of its submodules.

    `run()` is native. It enters a section, calls, looks at what comes out, and leaves. A call inside such a call is
    nested, and costs next to nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = weakref.ref(module)
        self.path: ReadPath | None = None
        self.guards: weakref.WeakSet[Any] = weakref.WeakSet()
        self.codes: dict[int, set[Any]] = {}  # of the frames that Dynamo compiles first, by what a guard calls
        self._clones = False

    def is_of(self, module: nn.Module) -> bool:
        """Was it made for this module?"""
        return self._module() is module

    def enter(self, path: ReadPath | None, *, clones: bool) -> None:
        """Enter sections of this subscriber from now on; None: of none. A call that waits to enter does so too.

        `clones`: outputs that are views of the weights are cloned.
        """
        self.path = path
        self._clones = clones
        plain = path is None or not path.optimistic  # no call is ever repeated, so all of it can be native
        self.set_reader(path, plain, clones)
        if path is not None:
            path.covers.add(self)

    # What the native half calls. Dynamo skips these frames, and compiles the module's own below them.

    @skip
    def _repeat(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call as run() of an optimistic subscriber does: again, if the section was torn."""
        if self.path is None:
            return inner(*args, **kwargs)
        return self.path.run_as_is(self.run_inside, inner, args, kwargs)

    @skip
    def _finish(self, out: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """What a call of these arguments returned, made fit to outlive its section. Called inside it."""
        return private(out, self.aliases, (*args, *kwargs.values())) if self._clones else out

    @disable
    def _look(self) -> None:
        """Warn, on the first call with gradients on, that they may come out wrong."""
        if self.path is not None and self.path.in_section:
            return  # the caller's section may well cover the backward pass
        self.gradients_checked = True
        module = self._module()
        if module is None or not any(p.requires_grad for p in module.parameters()):
            return
        warnings.warn(
            "a bound module ran with gradients on: if the weights change before backward(), the gradients are wrong. "
            "Put forward and backward in one `with sub.read():`, or use torch.no_grad()",
            stacklevel=3,
        )
