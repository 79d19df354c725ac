"""Can a worker process find the user's function? Asked before any is started, so that the error can say what to do."""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ProtocolError

_CURE = "put it into a file, as a function at the top level of a module, and import it from there"


def check_importable(work: Callable[..., Any], start_method: str) -> None:
    """Raise ProtocolError for a function that a process of this start method cannot find.

    fork copies the trainer, with every function in it. spawn and forkserver import the function by its name.
    """
    if start_method == "fork":
        return
    function: Any = work
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)  # of a bound method
    kind = function if hasattr(function, "__qualname__") else type(function)
    name, module = kind.__qualname__, kind.__module__
    if "<locals>" in name or "<lambda>" in name:
        raise ProtocolError(
            f"the workers cannot import {name}, which is defined inside a function: {_CURE}, or use start_method='fork'"
        )
    if module == "__main__" and (why := _why_not_in_main(function)) is not None:
        raise ProtocolError(
            f"the workers cannot import {name} of __main__, {why}: {_CURE} (in a notebook a cell with %%writefile "
            "makes one), or use start_method='fork'"
        )
    if isinstance(work, functools.partial):
        return  # what it holds may be a queue, which can be pickled only while a process is started
    try:
        pickle.dumps(kind)
    except (pickle.PicklingError, AttributeError, ImportError) as error:
        raise ProtocolError(f"the workers cannot import {name} of {module}: {error}; {_CURE}") from error


def _why_not_in_main(function: Any) -> str | None:
    """Why a process that imports the main file does not find a function of it there; None: it does."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file)):
        return "which has no file (a notebook, python -c, or an interactive session)"
    code = getattr(function, "__code__", None)
    if code is not None and code.co_filename.startswith("<"):
        return f"which was typed at a prompt ({code.co_filename}) and stands in no file"
    return None
