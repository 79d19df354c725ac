"""What torch.compile() must know of functions of ours, registered once.

Its front end is Dynamo, whose import takes as long as that of torch: a worker that compiles nothing never imports it.
So register() waits for that import. The native guards, sections and update() call it, once, before they run Python code
with Dynamo loaded (native/bind/compiling.hpp). What is compiled before that treats a guard as a break between graphs.

Which of our frames Dynamo leaves alone is marked in their code, which costs their calls nothing. Torch before 2.8 has
no such mark for all frames below: there disable() becomes torch.compiler.disable(), which adds 2 µs to a call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ... import _native
from ..read import outputs
from ..read.reading import ReadPath

F = TypeVar("F", bound=Callable[..., Any])

_ONLY_IT: Any = None
_ALL_BELOW: Any = None
try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    _ONLY_IT = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    _ALL_BELOW = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
except ImportError:
    from torch._C._dynamo.eval_frame import skip_code  # type: ignore[attr-defined]

_lock = threading.RLock()
_wrapped: list[tuple[type, str]] = []  # what register() wraps in an old torch
_registered = False


def register() -> None:
    """Tell Dynamo, which has been imported, what is new since the last call."""
    global _registered
    with _lock:
        while _wrapped:
            owner, name = _wrapped.pop()
            setattr(owner, name, torch.compiler.disable(vars(owner)[name]))
        if not _registered:
            torch.compiler.assume_constant_result(_covered)
            substitute: Any = torch.compiler.substitute_in_graph(_native.Guard.__call__, skip_signature_check=True)
            substitute(_in_compiled_code)
        _registered = True


def skip(function: F) -> F:
    """Dynamo compiles what this function calls, not its own frame. A decorator."""
    marked: Any = function
    if _ALL_BELOW is None:
        skip_code(marked.__code__)
    else:
        set_code_exec_strategy(marked.__code__, _ONLY_IT)
    marked._torchdynamo_disable = True  # for a caller that it compiles; as torch._dynamo.decorators.skip() does
    return function


def leave_alone(function: F) -> F:
    """Dynamo compiles neither this function nor what it calls. A decorator."""
    marked: Any = function
    if _ALL_BELOW is None:
        marked = torch.compiler.disable(function)
        return cast(F, marked)
    skip(function)
    set_code_exec_strategy(marked.__code__, _ALL_BELOW)
    return function


def disable(owner: type, *names: str) -> None:
    """Dynamo compiles neither these methods of a class nor what they call. It imports nothing."""
    if _ALL_BELOW is None:
        _wrapped.extend((owner, name) for name in names)
        if _registered:
            register()
        return
    for name in names:
        leave_alone(vars(owner)[name])


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


disable(ReadPath, "_reads_end", "_enter_slowly", "_checked_timeout", "_refresh_now", "_look_for_successor")
for function in (ReadPath.run, ReadPath.private, *outputs.FRAMES):
    skip(function)
# The first guard may run below code that Dynamo compiles, and then register() does.
if _ALL_BELOW is not None:
    leave_alone(register)
_native.when_compiling(register)
