"""Cover: the read sections of each call of a bound module, one for each arena that its tensors come from.

Those of a generator, and of a deepcopy(), last longer than one call.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from operator import attrgetter
from types import FrameType, GeneratorType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import _native
from ...errors import ProtocolError
from ...memory.dynamo import disable, skip
from ..read.outputs import unalias, unalias_error
from ..read.reading import Pinned, ReadPath
from .binding import Binding


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


class Sections:
    """One section of each path, as one. Pinned ones, since what they cover cannot be repeated."""

    def __init__(self, paths: list[ReadPath]) -> None:
        self._paths = paths
        self.open: list[_native.ReadSection] = []  # those that are entered, and not left

    def __enter__(self) -> None:
        """Enter all, or none."""
        try:
            for path in self._paths:
                with path.hold_lock():
                    if path.optimistic and not path.in_section:
                        path.forget_applied()  # so that entering takes the slow path, which knows about Pinned
                    self.open.append(path.read(timeout=Pinned(path.timeout)).__enter__())
        except BaseException:
            self.__exit__()
            raise

    def go_on(self) -> None:
        """Another step in them, in whatever thread this is."""
        for path, section in zip(self._paths, self.open, strict=False):
            _native.use_section_again(section)
            if path.copies_pending:  # this step may use another stream; nothing moves while the section is open
                path.use_copies()

    def __exit__(self, *error: object) -> None:
        """Leave all, in whatever thread this is. No call may be inside any more."""
        while self.open:
            _native.give_up_section(self.open.pop())


class _Unpinned(Exception):
    """A call returned a generator, whose section must be pinned, and the call's own is not."""


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
        self._pinned = False  # are the sections of the call as pinned as they can be? Set inside them.
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
        paths = sorted({each.path for each in self.members}, key=attrgetter("number"))
        clones = any(each.clones for each in self.members)
        self.enter(paths, clones=clones)

    def enter(self, paths: list[ReadPath], *, clones: bool) -> None:
        """Enter sections of these from now on."""
        self.paths = paths
        self._clones = clones
        plain = not any(path.optimistic for path in paths)  # no call is ever repeated, so all of it can be native
        self.set_readers(paths, plain, clones)

    # What the native half calls. Dynamo skips these frames, and compiles the module's own below them.

    @skip
    def _repeat(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call as run() of an optimistic subscriber does: again, if the section was torn."""
        try:
            return _run_in(list(self.paths), self.run_inside, inner, args, kwargs)
        except _Unpinned:
            pass
        with Sections(self.paths):
            try:
                self._pinned = True  # or the caller has a section open, which tells whether it was torn
                return self.run_inside(inner, args, kwargs)
            finally:
                self._pinned = False

    @skip
    def _held(self, generator: Generator[Any, Any, Any]) -> Held:
        """The generator, in sections from its first step to its end."""
        return Held(generator, self, Sections(self.paths))

    @skip
    def _finish(self, out: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """What a call of these arguments returned, made fit to outlive its sections. Called inside them."""
        if type(out) is GeneratorType:
            if not self._pinned and any(path.optimistic and not path.in_pinned_section for path in self.paths):
                out.close()
                raise _Unpinned
            held = self._held(out)
            held.hold()  # what it was made of is of this version
            return held
        cls = type(out)  # isinstance() would ask the object for its class
        if issubclass(cls, Coroutine):
            out.close()
        if issubclass(cls, (Coroutine, AsyncGenerator)):  # it runs later, between other things of its thread
            raise ProtocolError(
                "a method of a bound module returned a coroutine: at each await other code of this thread runs, so no "
                "read section can cover it. Make the part that uses the weights a plain method, and await around it"
            )
        return unalias(out, self.aliases, (*args, *kwargs.values())) if self._clones else out

    @skip
    def _failed(self, error: BaseException) -> None:
        """A call has raised this. Called inside its sections."""
        if self._clones:
            unalias_error(error, self.aliases)

    @disable
    def _traced(self) -> None:
        """Refuse a call that a tool records, which would use the weights later, outside of sections."""
        tool = traced_by()
        if tool is not None:
            raise ProtocolError(shares(tool, "the tensors of a bound module"))

    @disable
    def _look(self) -> None:
        """Warn, on the first call with gradients on, that they may come out wrong."""
        if any(path.in_section for path in self.paths):
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


class Held(Generator[Any, Any, Any]):
    """A generator that holds a section from its first step until it ends, is closed or is collected.

    Args:
        inner: the generator of the module's method.
        cover: through which each yielded value passes, and each error that leaves it, its returned value included.
        sections: are entered at the first step.
    """

    def __init__(self, inner: Generator[Any, Any, Any], cover: Cover, sections: Sections) -> None:
        self._inner, self._cover, self._sections, self._ended = inner, cover, sections, False

    def send(self, value: Any) -> Any:
        """Go on until the next value."""
        return self._step(lambda: self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        """Raise inside the generator."""
        return self._step(lambda: self._inner.throw(*error))

    def close(self) -> None:
        """End it, and leave the section."""
        try:
            self._inner.close()
        finally:
            self._leave()

    def hold(self) -> None:
        """Enter the section now."""
        if not self._sections.open:
            self._sections.__enter__()

    def _step(self, step: Callable[[], Any]) -> Any:
        if self._sections.open:
            self._sections.go_on()
        elif not self._ended:
            self.hold()
        try:
            try:
                return self._cover._finish(step())
            except BaseException as error:
                self._cover._failed(error)
                raise
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        self._ended = True
        self._sections.__exit__()

    def __del__(self) -> None:
        if self._sections.open:
            self.close()


def traced_by() -> str | None:
    """What records the calls of this thread, to make another module or a graph; None: nothing does.

    torch's flags are those of the process, and another thread may compile meanwhile, so the frames decide.
    """
    if torch.jit.is_tracing():
        return "torch.jit.trace()"
    export = "torch.export._trace"
    exported, tracing = export in sys.modules, torch.fx._symbolic_trace._is_fx_tracing_flag
    frame: FrameType | None = sys._getframe(1) if exported or tracing else None
    while frame is not None:
        if tracing and frame.f_code is _TRACE:
            return "a trace of torch.fx"
        if exported and frame.f_globals.get("__name__") == export:
            return "torch.export.export()"
        frame = frame.f_back
    return None


_TRACE = inspect.unwrap(torch.fx.Tracer.trace).__code__  # Dynamo wraps it at its first use


def shares(tool: str, what: str) -> str:
    """Why a tool is refused that would make something which shares bound tensors."""
    return (
        f"{tool} would make an object that shares {what}: they change with each version, and no read section would "
        "cover it. Nothing was changed. Make it from copy.deepcopy(module), which keeps the weights of its version; or "
        "make it before bind(), and use it in `with sub.read():`"
    )


@skip
def _run_in(paths: list[ReadPath], call: Callable[..., Any], *args: Any) -> Any:
    if not paths:
        return call(*args)
    return paths[0].run_as_is(_run_in, paths[1:], call, *args)
