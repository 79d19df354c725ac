"""One send at a time: calls of other threads wait for their turn, until their own deadlines."""

from __future__ import annotations

from .. import _native


class Turns:
    """Of one sender, or of one model over one pipe. A copy, also a pickled one, has turns of its own."""

    def __init__(self) -> None:
        self.lock = _native.TurnLock()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()


def turn(turns: list[Turns], deadline: float, call: str) -> _native.Turn:
    """What a `with` statement takes all of these turns by; `call` is what its errors call it.

    All threads take them in one order. Raises WriterBusy at the monotonic time `deadline`, and at once where the
    same thread has one of them already: in a signal handler, or in a hook of a send that sends.
    """
    return _native.Turn([each.lock for each in turns], deadline, call)
