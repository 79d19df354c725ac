"""Read sections that last longer than one call: those of a generator, and of a deepcopy()."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from ... import _native
from ..read.reading import Pinned, ReadPath


class Sections:
    """One section of each path, as one. Pinned ones, since what they cover cannot be repeated."""

    def __init__(self, paths: list[ReadPath]) -> None:
        self._paths = paths
        self._open: list[_native.ReadSection] = []

    @property
    def entered(self) -> bool:
        """Are they entered, and not left?"""
        return bool(self._open)

    def __enter__(self) -> None:
        """Enter all, or none."""
        try:
            for path in self._paths:
                with path._exclusive():
                    if path.optimistic and not path._mine:
                        path._forget()  # so that entering takes the slow path, which knows about Pinned
                    self._open.append(path.read(timeout=Pinned(path.timeout)).__enter__())
        except BaseException:
            self.__exit__()
            raise

    def go_on(self) -> None:
        """Another step in them, in whatever thread this is."""
        for section in self._open:
            section._used_again()

    def __exit__(self, *error: object) -> None:
        """Leave all, in whatever thread this is. No call may be inside any more."""
        while self._open:
            self._open.pop()._give_up()


@dataclass(eq=False, repr=False)
class Held(Generator[Any, Any, Any]):
    """A generator that holds a section from its first step until it ends, is closed or is collected.

    Args:
        inner: the generator of the module's method.
        sections: are entered at the first step.
        finish: what each yielded value passes through.
        failed: what is called with an error that leaves it, the one with its returned value included.
    """

    inner: Generator[Any, Any, Any]
    sections: Sections
    finish: Callable[[Any], Any]
    failed: Callable[[BaseException], None]
    ended: bool = field(default=False, init=False)

    def send(self, value: Any) -> Any:
        """Go on until the next value."""
        return self._step(lambda: self.inner.send(value))

    def throw(self, *error: Any) -> Any:
        """Raise inside the generator."""
        return self._step(lambda: self.inner.throw(*error))

    def close(self) -> None:
        """End it, and leave the section."""
        try:
            self.inner.close()
        finally:
            self._leave()

    def hold(self) -> None:
        """Enter the section now."""
        if not self.sections.entered:
            self.sections.__enter__()

    def _step(self, step: Callable[[], Any]) -> Any:
        if self.sections.entered:
            self.sections.go_on()
        elif not self.ended:
            self.hold()
        try:
            try:
                return self.finish(step())
            except BaseException as error:
                self.failed(error)
                raise
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        self.ended = True
        self.sections.__exit__()

    def __del__(self) -> None:
        if self.sections.entered:
            self.close()
