"""Calls that wait for the import of a module: what we register with packages that most workers never import."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], object]]] = {}
_lock = threading.RLock()  # re-entrant: a call may register others


def when_imported(module: str, call: Callable[[], object]) -> None:
    """Make this call as soon as the module has been imported: now, or at the end of its import."""
    with _lock:
        _waiting.setdefault(module, []).append(call)
        if module not in sys.modules and _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    if module in sys.modules:
        import_module(module)  # another thread may be in the middle of it
        _call(module)


def _call(module: str) -> None:
    with _lock:
        calls = _waiting.pop(module, [])
        if not _waiting:  # another list: a thread that goes through this one would miss a finder
            sys.meta_path = [each for each in sys.meta_path if each is not _finder]
    for call in calls:
        call()


class _Finder(MetaPathFinder):
    """Finds the modules that calls wait for as the other finders do, and notices when they have been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As importlib asks each finder."""
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _notice(name, spec.loader)
                    return spec
        return None


def _notice(name: str, loader: Any) -> None:
    """The module keeps its own loader, which reads its source and its files later."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _call(name)

    loader.exec_module = exec_module


_finder = _Finder()
