"""What torch.compile() must know of functions of ours, registered once.

Its front end is Dynamo, whose import takes as long as that of torch: a worker that compiles nothing never imports it.
So register() waits for that import. The native guards, sections and update() call it, once, before they run Python code
with Dynamo loaded (native/bind/compiling.hpp). What is compiled before that treats a guard as a break between graphs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from ... import _native
from ..read import outputs
from ..read.reading import ReadPath

F = TypeVar("F", bound=Callable[..., Any])

_lock = threading.RLock()
_skipped: list[Callable[..., Any]] = []  # what register() tells Dynamo of
_disabled: list[tuple[type, str]] = []
_registered = False


def register() -> None:
    """Tell Dynamo, which has been imported, what is new since the last call."""
    global _registered
    from torch._dynamo.decorators import skip as skip_frame

    with _lock:
        while _skipped:
            # torch.compiler.disable(recursive=False) is this plus a frame around each call.
            skip_frame(_skipped.pop())
        while _disabled:
            owner, name = _disabled.pop()
            setattr(owner, name, torch.compiler.disable(vars(owner)[name]))
        if not _registered:
            torch.compiler.assume_constant_result(_covered)
            substitute: Any = torch.compiler.substitute_in_graph(_native.Guard.__call__, skip_signature_check=True)
            substitute(_in_compiled_code)
        _registered = True


def skip(function: F) -> F:
    """Dynamo compiles what this function calls, not its own frame. A decorator."""
    _skipped.append(function)
    if _registered:
        register()
    return function


def disable(owner: type, *names: str) -> None:
    """Dynamo compiles neither these methods of a class nor what they call."""
    _disabled.extend((owner, name) for name in names)
    if _registered:
        register()


covers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # of guards, by their `number`


def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `inner` from a frame that Dynamo compiles: it skips frames of torch.nn, such as Sequential's own forward."""
    return inner(*args, **kwargs)


def first_frames(entered: Callable[..., Any], inner: Callable[..., Any], *, whole: bool) -> set[Any]:
    """The code of the frames that Dynamo may compile first when it compiles what a guard calls.

    `entered` is what it calls: `inner`, the method that it stands for, or call() around it. `whole`: that is compiled.
    """
    if entered is not inner:
        return {call.__code__}
    if whole:
        from torch._dynamo.external_utils import wrap_inline

        # The frame in which Dynamo compiles what is no function of the user's, such as a module of torch.nn.
        return {wrap_inline(len).__code__}
    return {getattr(getattr(inner, "__func__", inner), "__code__", None)}


def _in_compiled_code(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What Dynamo compiles where compiled code calls a guard."""
    if not _covered(self.number):
        torch._dynamo.graph_break()  # back to Python, where a section can be entered
    return self.inner(*args, **kwargs)


def _covered(number: int) -> bool:
    """Is the code that Dynamo compiles now a method that a guard of this cover has entered?

    Then sections cover that code whenever it runs, and the guards that it calls have nothing to do. Dynamo asks while
    it traces; the answer becomes part of the compiled code.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    cover = covers.get(number)
    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:  # another version of torch
        return False
    return cover is not None and code in cover.codes.get(id(cover.running), ())


disable(ReadPath, "_reads_end", "_enter_slow", "_checked_timeout", "_refresh_slow", "_look_for_successor")
for function in (ReadPath.run, ReadPath.private, *outputs.FRAMES):
    skip(function)

_compiles: Callable[[], object] | None = None
with suppress(ImportError):  # this torch does not say
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as _compiles
with suppress(ImportError):  # in a torch without it, the first call of a guard breaks the graph
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    # The first guard may run below code that Dynamo compiles, and then register() does.
    set_code_exec_strategy(register.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))

_native.when_compiling(register, _compiles)
