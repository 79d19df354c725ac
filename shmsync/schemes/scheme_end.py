"""What a scheme makes on either side: the sender or the receiver of one model, with a context that it holds weakly."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from typing_extensions import Self


class SchemeEnd:
    """What the sender and the receiver of a model have in common."""

    _copied = False  # it came out of a pickle, without the workers or the sender of the original

    def __init__(self, scheme: Any) -> None:
        self._scheme = scheme
        self._strategy = scheme.make_strategy()
        self._model_id = "policy"
        self._begin()

    def _begin(self) -> None:
        kept = set(vars(self))
        self._start_here()
        self._only_here = vars(self).keys() - kept

    def _start_here(self) -> None:
        """Set the attributes that belong to this process. Copies and pickles leave them out, and set them again."""
        self._context_ref: weakref.ref[Any] | None = None

    def _set_context(self, context: Any) -> None:
        """Look for the model here. Held weakly. A hook: a subclass may override it, in every scheme."""
        self._context_ref = None if context is None else weakref.ref(context)

    @property
    def model_id(self) -> str:
        """Which model it sends or receives."""
        return self._model_id

    @property
    def _living_context(self) -> Any:
        return None if self._context_ref is None else self._context_ref()

    def __copy__(self) -> Self:
        # As a pickled copy, but with a copy of the scheme: that may hold what its senders send with, pipes and arenas.
        made = object.__new__(type(self))
        made.__setstate__({**self.__getstate__(), "_scheme": copy.copy(self._scheme)})
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._only_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._copied = True
        self._begin()
