"""Calls of transports that know of no deadline, made so that the send that needs them ends at its own.

A method that takes `timeout=` gets what is left, and is called as it is. One that does not, in a send with a deadline,
runs in a thread of its own: the send goes on when its time is over, and the next one to the same worker waits for that
thread. Of a transport in two steps it also waits for the answers that came too late for theirs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from ...engine.outcome import Outcome, Wording
from .timed_queue import TimedQueue

_log = logging.getLogger("shmsync")
_WORDING = Wording("its transport has not come back", after_lateness="Send again, or give more time with timeout=")


class BlockingCall:
    """One call in a thread of its own. A daemon, since it may never return."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._bell: TimedQueue[None] = TimedQueue()
        self._done = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="shmsync blocking call")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.error = error
        del self._function  # and the weights that it holds
        self._done = True
        self._bell.put(None)

    def done_by(self, deadline: float) -> bool:
        """Wait for it until that monotonic time; has it returned?"""
        if not self._done:
            with contextlib.suppress(queue.Empty):
                self._bell.get(deadline - time.monotonic())
                self._bell.put(None)  # for the next one that asks
        if self._done:
            self._thread.join()  # it has nothing left to do
        return self._done


class BlockingCalls:
    """The calls of one sender that are under way, by worker. A copy has none."""

    def __init__(self) -> None:
        self.under_way: dict[int, tuple[Any, BlockingCall]] = {}  # the transport, and what it does
        self._owed: dict[int, tuple[Any, int]] = {}  # the transport, and how many answers are to come over it

    def __reduce__(self) -> tuple[type[BlockingCalls], tuple[()]]:
        return BlockingCalls, ()

    def owed(self, index: int, transport: Any) -> int:
        """The number of messages sent over this transport that are unanswered."""
        known = self._owed.get(index)
        return known[1] if known is not None and known[0] is transport else 0

    def owes(self, index: int, transport: Any, answers: int) -> None:
        """So many answers are to come over this worker's transport."""
        self._owed[index] = transport, answers

    def earlier(self, index: int, transport: Any) -> BlockingCall | None:
        """What this worker's transport still does of an earlier send."""
        known = self.under_way.get(index)
        return known[1] if known is not None and known[0] is transport else None


class Calls:
    """The steps of one send: the same method of several workers' transports, then the next one."""

    def __init__(self, blocking_calls: BlockingCalls, transports: Mapping[int, Any], what: str, version: int) -> None:
        self._blocking_calls = blocking_calls
        self._transports = dict(transports)
        self._left = dict(transports)  # whose steps were all done so far
        self._running: dict[int, BlockingCall] = {}
        self._late: dict[int, str] = {}
        self._errors: dict[int, Exception] = {}
        self._what, self._version = what, version

    def send(self, model_id: str, weights: Any, deadline: float) -> None:
        """Call send_weights_async(), or send_weights() of those that have nothing else."""
        kept: list[Any] = []

        def copy() -> Any:  # a thread may still read it when the trainer has gone on to change its weights
            if not kept:
                kept.append(_copied(weights))
            return kept[0]

        def step(index: int, in_thread: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            transport = self._left[index]
            earlier = self._blocking_calls.earlier(index, transport)
            if hasattr(transport, "forget_posted") and (earlier is None or earlier.done_by(0.0)):
                transport.forget_posted()  # an earlier send was interrupted before its wait_ack()
                self._blocking_calls.owes(index, transport, 0)
            method = getattr(transport, "send_weights_async", transport.send_weights)
            if _has_two_steps(transport):
                method = self._counted(index, transport, method)
            return method, (model_id, copy() if in_thread else weights)

        self._all(step, deadline)

    def finish(self, deadline: float) -> None:
        """Wait for what send() began, then call wait_ack() of those that have both. Raises what became of them."""
        self._settle(deadline)
        waiting = {index: transport for index, transport in self._left.items() if _has_two_steps(transport)}
        self._left = waiting
        self._all(lambda index, in_thread: (self._answered(index, waiting[index], deadline), ()), deadline)
        self._settle(deadline)
        outcome = Outcome(_WORDING)
        outcome.late = sorted({*self._late, *self._running})
        outcome.notes = sorted(set(self._late.values()))
        for index in sorted(self._errors):
            raise self._errors[index]
        outcome.check(self._what, self._version)

    def _counted(self, index: int, transport: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method that sends; an answer is to come from then on."""

        @functools.wraps(method)  # with its signature
        def send(*args: Any, **given: Any) -> None:
            before = self._blocking_calls.owed(index, transport)
            self._blocking_calls.owes(index, transport, before + 1)
            try:
                method(*args, **given)
            except Exception:
                self._blocking_calls.owes(index, transport, before)
                raise

        return send

    def _answered(self, index: int, transport: Any, deadline: float) -> Callable[..., Any]:
        """wait_ack(), once for each answer that is to come: the last of them is that to this send.

        An earlier send may have been late or interrupted, and its answer is not this one's.
        """
        blocking_calls, method = self._blocking_calls, transport.wait_ack

        @functools.wraps(method)
        def wait(timeout: float | None = None) -> None:
            while (owed := blocking_calls.owed(index, transport)) > 0:
                given = {} if timeout is None else {"timeout": max(0.0, deadline - time.monotonic())}
                try:
                    method(**given)
                except TimeoutError:
                    raise  # it is still to come
                except Exception:
                    blocking_calls.owes(index, transport, owed - 1)
                    if owed == 1:
                        raise
                    _log.warning("worker %d has answered an earlier send with an error", index, exc_info=True)
                else:
                    blocking_calls.owes(index, transport, owed - 1)

        return wait

    def _all(self, step: Callable[[int, bool], tuple[Callable[..., Any], tuple[Any, ...]]], deadline: float) -> None:
        direct, held_up = [], []
        for index, transport in list(self._left.items()):
            method, _ = step(index, False)
            earlier = self._blocking_calls.earlier(index, transport)
            if earlier is not None and not earlier.done_by(0.0):
                held_up.append(index)
            elif deadline == math.inf or _takes_timeout(method):
                direct.append(index)
            else:
                self._start(index, *step(index, True))
        for index in direct:
            self._call(index, *step(index, False), deadline)
        for index in held_up:
            earlier = self._blocking_calls.earlier(index, self._left[index])
            if earlier is not None and not earlier.done_by(deadline):
                del self._left[index]
                self._late[index] = f"the transport of worker {index} is still busy with an earlier send"
            elif deadline == math.inf or _takes_timeout(step(index, False)[0]):
                self._call(index, *step(index, False), deadline)
            else:
                self._start(index, *step(index, True))
        self._settle(deadline)

    def _start(self, index: int, method: Callable[..., Any], args: tuple[Any, ...]) -> None:
        blocking = BlockingCall(lambda: method(*args))
        self._running[index] = blocking
        self._blocking_calls.under_way[index] = (
            self._left.pop(index),
            blocking,
        )  # before it starts: an interrupt may come
        blocking.start()

    def _call(self, index: int, method: Callable[..., Any], args: tuple[Any, ...], deadline: float) -> None:
        given = {}
        if deadline != math.inf and _takes_timeout(method):
            given["timeout"] = max(0.0, deadline - time.monotonic())
        try:
            method(*args, **given)
        except Exception as error:
            self._failed(index, error)

    def _settle(self, deadline: float) -> None:
        """Collect the calls that have returned by then."""
        for index, blocking in list(self._running.items()):
            if blocking.done_by(deadline):
                del self._running[index]
                self._blocking_calls.under_way.pop(index, None)
                self._left[index] = self._transports[index]
                if isinstance(blocking.error, Exception):
                    self._failed(index, blocking.error)
                elif blocking.error is not None:
                    raise blocking.error

    def _failed(self, index: int, error: Exception) -> None:
        del self._left[index]
        if isinstance(error, TimeoutError):
            self._late[index] = f"worker {index}: {error}" if str(error) else f"worker {index} timed out"
        else:
            self._errors[index] = error


def _has_two_steps(transport: Any) -> bool:
    return hasattr(transport, "send_weights_async") and hasattr(transport, "wait_ack")


def _takes_timeout(method: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return any(each.name == "timeout" or each.kind is each.VAR_KEYWORD for each in parameters)


def _copied(weights: Any) -> Any:
    if isinstance(weights, torch.Tensor):
        return weights.detach().clone()
    if isinstance(weights, TensorDictBase):
        return weights.detach().clone()
    if isinstance(weights, Mapping):
        return {key: _copied(value) for key, value in weights.items()}
    return weights
