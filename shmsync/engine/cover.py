"""The sections that cover each call of a bound module: one of each arena that any of its tensors come from."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator, Mapping
from types import GeneratorType, MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch._dynamo.decorators import skip
from torch.compiler import disable

from .. import _native
from .binding import Binding
from .outputs import Held, refuse_awaitable, unalias
from .reading import Pinned, ReadPath


class Member(NamedTuple):
    """One binding, as its cover knows it."""

    path: ReadPath
    binding: weakref.ref[Binding]
    tensors: set[int]  # ids of those that it moves
    clones: bool  # are outputs that are views cloned?

    def ended(self, taken: set[int]) -> bool:
        """Is there nothing left that a section of it would cover? `taken`: what is bound now."""
        binding = self.binding()
        if binding is not None and binding.serves:
            return False
        if binding is not None and binding.ended:
            return True
        self.tensors.difference_update(taken)  # its Subscriber is closed: calls raise until all of it is bound again
        return not self.tensors


class Cover(_native.Cover):
    """Shared by all guards of a module and of whatever is bound together with it.

    `run()` is native. It enters a section of each path, calls, looks at what comes out, and leaves. A call inside such
    a call is nested, and costs next to nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = weakref.ref(module)
        self.members: list[Member] = []
        self.paths: list[ReadPath] = []
        self.guards: weakref.WeakSet[Any] = weakref.WeakSet()
        self.codes: dict[int, set[Any]] = {}  # of the frames that Dynamo compiles first, by what a guard calls
        self._use()

    def add(self, path: ReadPath, binding: Binding, clones: bool) -> None:
        """Enter sections of this binding's arena too, from now on. A call that waits to enter does so too."""
        self.members.append(Member(path, weakref.ref(binding), binding.tensors(), clones))
        self._use()

    def drop_ended(self, taken: set[int]) -> None:
        """Enter no sections for bindings that have ended. `taken`: ids of the tensors that are bound now."""
        self.members = [each for each in self.members if not each.ended(taken)]
        self._use()

    def absorb(self, other: Cover) -> None:
        """Take over the members and guards of another cover."""
        self.members += other.members
        for guard in list(other.guards):
            guard.use(self)
            self.guards.add(guard)
        self._use()

    def _use(self) -> None:
        paths = sorted({each.path.number: each.path for each in self.members}.items())
        clones = any(each.clones for each in self.members)
        self.enter([path for _, path in paths], plain=not any(path.optimistic for _, path in paths), clones=clones)

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
    def _finish(self, out: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """What a call of these arguments returned, made fit to outlive its sections. Called inside them."""
        if isinstance(out, GeneratorType):
            held = self._held(out)
            held.hold()  # what it was made of is of this version
            return held
        refuse_awaitable(out)
        return unalias(out, self.aliases, (*args, *kwargs.values())) if self._clones else out

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
        self._open: list[_native.ReadSection] = []

    def enter(self) -> None:
        """Enter all, or none."""
        try:
            for path in self._paths:
                with path._exclusive():
                    if path.optimistic and not path._mine:
                        path._forget()  # so that entering takes the slow path, which knows about Pinned
                    self._open.append(path.read(timeout=Pinned(path.timeout)).__enter__())
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave all, in whatever thread this is. Nobody may be inside any more."""
        while self._open:
            self._open.pop()._give_up()
