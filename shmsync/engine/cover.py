"""The sections that cover each call of a bound module: one of each arena that any of its tensors come from."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack
from types import CodeType, GeneratorType, TracebackType
from typing import Any

from torch import nn
from torch._dynamo.decorators import skip
from torch.compiler import disable

from .. import _native
from .binding import Binding
from .outputs import Held, refuse_awaitable, unalias
from .reading import Pinned, ReadPath


class Cover(_native.Cover):
    """Shared by all guards of a module and of whatever is bound together with it.

    `run()` is native. It enters a section of each path in the order in which they were bound, calls, looks at what
    comes out, and leaves. A call inside such a call is nested, and costs next to nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = weakref.ref(module)
        # In the order of binding; the value: are outputs cloned?
        self.members: weakref.WeakKeyDictionary[Binding, bool] = weakref.WeakKeyDictionary()
        self.paths: list[ReadPath] = []
        self.guards: weakref.WeakSet[Any] = weakref.WeakSet()
        self.codes: set[CodeType | None] = set()  # of the methods that its guards call
        self._use()

    def add(self, binding: Binding, clones: bool) -> None:
        """Enter sections of this binding's arena too, from now on. A call that waits to enter does so too."""
        self.members[binding] = clones
        self._use()

    def drop_ended(self) -> None:
        """Enter no sections for bindings that have ended."""
        for each in [each for each in self.members if not each.serves]:
            del self.members[each]
        self._use()

    def absorb(self, other: Cover) -> None:
        """Take over the members and guards of another cover."""
        self.members.update(other.members)
        for guard in list(other.guards):
            guard.use(self)
            self.guards.add(guard)
        self._use()

    def _use(self) -> None:
        paths = list(dict.fromkeys(path for each in self.members if (path := each.path()) is not None))
        self.enter(paths, plain=not any(path.optimistic for path in paths), clones=any(self.members.values()))

    def enter(self, paths: list[ReadPath], *, plain: bool, clones: bool) -> None:
        """Enter sections of these. `plain`: no call is ever repeated, so all of it can be native."""
        self.paths = paths
        self._clones = clones
        self._set(paths, plain, clones)

    # What the native half calls. Dynamo skips these frames, and compiles the module's own below them.

    @skip
    def _repeat(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call as run() of an optimistic subscriber does: again, if the section was torn."""
        return _run_in(list(self.paths), self._run_inside, inner, args, kwargs)

    @skip
    def _held(self, generator: Generator[Any, Any, Any]) -> Held:
        """The generator, in sections from its first step to its end."""
        return Held(generator, Sections(self.paths), self._finish)

    @skip
    def _finish(self, out: Any) -> Any:
        """What a call returned, made fit to outlive its sections. Called inside them."""
        if isinstance(out, GeneratorType):
            held = self._held(out)
            held.hold()  # what it was made of is of this version
            return held
        refuse_awaitable(out)
        return unalias(out, self.aliases) if self._clones else out

    @disable
    def _look(self) -> None:
        """Warn, on the first call with gradients on, that they may come out wrong."""
        if any(path._mine for path in self.paths):
            return  # the caller's section may well cover the backward pass
        self._looked = True
        module = self._module()
        if module is None or not any(p.requires_grad for p in module.parameters()):
            return
        warnings.warn(
            "a bound module ran with gradients on: if the weights change before backward(), the gradients are wrong. "
            "Put forward and backward in one `with sub.read():`, or use torch.no_grad()",
            stacklevel=3,
        )


@skip
def _run_in(paths: list[ReadPath], call: Callable[..., Any], *args: Any) -> Any:
    if not paths:
        return call(*args)
    return paths[0].run(_run_in, paths[1:], call, *args)


class Sections:
    """One section of each path, as one. Pinned ones, since what they cover cannot be repeated."""

    def __init__(self, paths: list[ReadPath]) -> None:
        self._paths = paths
        self._open = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for path in self._paths:
                with path._exclusive():
                    if path.optimistic and not path._mine:
                        path._forget()  # so that entering takes the slow path, which knows about Pinned
                    stack.enter_context(path.read(timeout=Pinned(path.timeout)))
            self._open = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, traceback)
