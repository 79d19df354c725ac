"""Whose turn it is: those who call a model in a worker and those who move its weights exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .... import _native


class ModelLock(_native.ModelTurn):
    """A re-entrant lock for one model.

    The listening thread does not wait for its turn. It leaves its work in `rang`, and the thread that has the turn does
    that work when its turn ends.
    """

    _rang: Callable[[], Any] | None = None

    @property
    def rang(self) -> Callable[[], Any] | None:
        """What is left to do; None: nothing."""
        return self._rang

    @rang.setter
    def rang(self, work: Callable[[], Any] | None) -> None:
        self._rang = work
        self._asked = work is not None  # last: then there is something to do

    def _ring(self) -> None:
        """Called by the native half when a turn has ended and something is left to do."""
        work = self._rang
        if work is not None:
            work()
