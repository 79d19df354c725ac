"""Attaching a reader to an arena, with the arguments that a Subscriber takes."""

from __future__ import annotations

from contextlib import ExitStack

from ..._native import Consistency
from ...memory import attaching
from ...memory.control.segment import Handle
from ...memory.system.process import Peers
from ..deadlines import check_worker, timeout_or_default
from .reading import ReadPath
from .successor import Successor

_CONSISTENCIES = {each.name.lower(): each for each in Consistency}


def open_reader(
    handle_or_name: Handle | str, consistency: str, worker: int | None, timeout: float | None, follow: bool
) -> ReadPath:
    """Attach, for the arguments of Subscriber, all checked. Applies nothing yet."""
    if not isinstance(consistency, str) or consistency not in _CONSISTENCIES:
        raise ValueError(f"consistency is one of {', '.join(_CONSISTENCIES)}, not {consistency!r}")
    if worker is not None:
        worker = check_worker(worker)
    timeout = timeout_or_default(timeout)
    if not isinstance(follow, bool):
        raise TypeError(f"follow is True or False, not {follow!r}")
    name, session = _name_and_session(handle_or_name)
    with ExitStack() as undo:
        peers = Peers()
        undo.callback(peers.close)
        # A reader that follows restarts may itself start between the death and the restart.
        await_restart = follow and session is None
        attached = attaching.attach(name, session, worker, timeout, peers, pass_over_dead=await_restart)
        release = attaching.Release(attached, peers)
        undo.callback(release)
        successor = Successor(name, worker, peers) if follow else None
        reader = ReadPath(attached, release, peers, _CONSISTENCIES[consistency], name, timeout, successor)
        undo.pop_all()  # all of it is the reader's now
    return reader


def _name_and_session(handle: Handle | str) -> tuple[str, bytes | None]:
    if isinstance(handle, str):
        return handle, None
    if isinstance(handle, tuple) and [type(part) for part in handle] == [str, bytes]:
        return handle[0], handle[1]
    raise TypeError(f"pass pub.handle or the arena's name, not the {type(handle).__name__} {handle!r}")
