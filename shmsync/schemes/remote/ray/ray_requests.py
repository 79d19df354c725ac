"""Calls of Ray actors."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from ....engine.outcome import Failure
from ....errors import ProtocolError
from ..remote_requests import Call, Failed, Gone


def require_ray(user: str) -> Any:
    """The ray package. Raises ImportError, naming the extra, when it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"{user} needs Ray, which is not installed; pip install 'shmsync[ray]'") from error
    return ray


class RayCall(Call):
    """A call of an actor's method.

    Args:
        reference: what the call returned.
        payload: the object reference that the call got; Ray keeps the object while a reference exists.
    """

    def __init__(self, reference: Any, payload: Any = None) -> None:
        self.reference = reference
        self.payload = payload
        self.known_finished = False
        self.looked = 0.0  # when; asking takes 60 µs, so a wait asks for all calls at once

    @override
    def finished(self) -> bool:
        if not self.known_finished and time.monotonic() - self.looked > 0.001:
            look([self], 0.0)
        return self.known_finished

    @override
    def result(self) -> Any:
        import ray
        from ray import exceptions

        gone = (
            exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError,
            # It never started.
            exceptions.ActorUnschedulableError, exceptions.RuntimeEnvSetupError, exceptions.ActorPlacementGroupRemoved,
        )  # fmt: skip
        try:
            return ray.get(self.reference)
        except exceptions.RayTaskError as error:
            raise Failed(failure_of(error)) from error
        except gone as error:
            final = not isinstance(error, exceptions.ActorUnavailableError)
            raise Gone(f"Ray: {_short(str(error))}", final=final) from error
        except exceptions.RayError as error:  # what the actor raised cannot be rebuilt here, an object is lost, ...
            raise Failed(failure_of(error)) from error


def _plain(text: str) -> list[str]:
    """The lines of what Ray says, without colours and pointers."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    return [line for line in lines if line.strip("^~ ")]


def _short(text: str) -> str:
    """What Ray says of a dead actor, in a line: how it starts and, when it raised in its constructor, what."""
    lines = _plain(text)
    if "creation task" in text:
        return f"{lines[0].partition(',')[0]}: {lines[-1]}"[:300]
    return " ".join(lines)[:300]


def require_running() -> None:
    """Raise ProtocolError when Ray does not run in this process; its own calls would start one, on this machine."""
    import ray

    if not ray.is_initialized():
        raise ProtocolError("Ray is not running in this process; call ray.init() before you send")


def invoke(actor: Any, method: str, argument: str, content: Any) -> Any:
    """Call an actor's method. Raises Failed, with a TypeError, when it has no such method, or other parameters."""
    wanted = f"{method}({argument})"
    try:
        bound = getattr(actor, method)
    except AttributeError as error:
        raise _refused(f"the actor has no method {method}(), which weights are sent to; define {wanted}") from error
    try:
        return bound.remote(**{argument: content})
    except TypeError as error:
        raise _refused(f"the actor's method does not take the weights: {error}; define it as {wanted}") from error


def _refused(message: str) -> Failed:
    return Failed(Failure.of(TypeError(message))._replace(trace=message))


def failure_of(error: Any) -> Failure:
    """What an actor raised."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, BaseException):  # of a class that cannot be rebuilt here; the text ends with the exception
        text = _plain(str(error))
        return Failure(None, None, text[-1] if text else repr(error), str(error))
    return Failure.of(cause)._replace(trace=str(error))


def look(calls: Sequence[RayCall], seconds: float) -> None:
    """Find out which of these calls are finished; wait until one is, but no longer than that."""
    import ray

    by_reference = {call.reference: call for call in calls}
    ready, rest = ray.wait(list(by_reference), num_returns=1, timeout=seconds)
    if rest and seconds:
        ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
    now = time.monotonic()
    for call in calls:
        call.looked = now
    for reference in ready:
        by_reference[reference].known_finished = True
