"""Run the blocking calls of transports so that send() still meets its deadline.

A method that takes `timeout=` gets the seconds that are left, on the calling thread. One without it, in a send with a
deadline, runs on the SerialExecutor of its transport. The send returns when its time is over. The next send to the same
worker waits for the earlier call. With a transport in two steps it also waits for the answers to earlier sends.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from ...engine.outcome import Outcome, Wording
from .serial_executor import GRACE, SerialExecutor, Task

_log = logging.getLogger("shmsync")
_WORDING = Wording("its transport has not returned", after_lateness="Send again, or give more time with timeout=")
Method = Callable[..., Any]


class UnackedCount:
    """The number of messages of a transport in two steps that are not answered."""

    value = 0


class CallState:
    """What the sends of one sender have left at one transport.

    INV: no call refers to the state, or a call that blocks would keep its executor, and the thread, after the sender.
    """

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.task: Task | None = None  # a call that has not returned, or whose result was not taken yet
        self.unacked = UnackedCount()
        self.executor = SerialExecutor()  # its thread starts with the first call

    def idle_by(self, deadline: float) -> bool:
        """Wait until that monotonic time for the call in progress. Has it returned?"""
        return self.task is None or self.task.done_by(deadline)


class Calls:
    """The steps of one send: the same method of several workers' transports, then the next one.

    Args:
        states: of the sender's transports, by worker; a new transport gets a new one.
    """

    def __init__(self, states: dict[int, CallState], transports: Mapping[int, Any], what: str, version: int) -> None:
        for index, transport in transports.items():
            if index not in states or states[index].transport is not transport:
                states[index] = CallState(transport)
        # The workers whose steps were all done so far, then those whose call is in progress.
        self._ready = {index: states[index] for index in transports}
        self._running: dict[int, CallState] = {}
        self._late: dict[int, str] = {}
        self._errors: dict[int, Exception] = {}
        self._what, self._version = what, version

    def send(self, model_id: str, weights: Any, deadline: float) -> None:
        """Call send_weights_async(), or send_weights() of transports without it."""
        copied = functools.cache(lambda: _copied(weights))  # a thread may read it after the trainer's next step

        def call_of(index: int, method: Method, in_thread: bool) -> Method:
            transport, unacked = self._ready[index].transport, self._ready[index].unacked
            if hasattr(transport, "forget_posted"):
                transport.forget_posted()  # an earlier send was interrupted before its wait_ack()
                unacked.value = 0
            content = copied() if in_thread else weights

            def send(**given: Any) -> None:
                before = unacked.value
                unacked.value += 1
                try:
                    method(model_id, content, **given)
                except Exception:
                    unacked.value = before
                    raise

            return send

        methods = {
            index: getattr(state.transport, "send_weights_async", state.transport.send_weights)
            for index, state in self._ready.items()
        }
        self._call_all(methods, call_of, deadline)

    def finish(self, deadline: float) -> None:
        """Wait for the calls that send() started, then call wait_ack() of transports in two steps.

        Raises the first error of a transport, or AckTimeout with the late workers.
        """
        self._take_results(deadline)
        self._ready = {index: state for index, state in self._ready.items() if _in_two_steps(state.transport)}

        def call_of(index: int, method: Method, in_thread: bool) -> Method:
            unacked = self._ready[index].unacked

            def wait(**given: Any) -> None:
                # An earlier send may have been late or interrupted: the last answer is the one to this send.
                while unacked.value > 0:
                    try:
                        method(**(given and {"timeout": max(0.0, deadline - time.monotonic())}))
                    except TimeoutError:
                        raise  # the answer is still to come
                    except Exception:
                        unacked.value -= 1
                        if unacked.value == 0:
                            raise
                        said = traceback.format_exc()  # a kept log record keeps neither weights nor this thread alive
                        _log.warning("worker %d has answered an earlier send with an error:\n%s", index, said)
                    else:
                        unacked.value -= 1

            return wait

        methods = {index: state.transport.wait_ack for index, state in self._ready.items()}
        self._call_all(methods, call_of, deadline)
        outcome = Outcome(_WORDING)
        outcome.late = sorted({*self._late, *self._running})
        outcome.notes = sorted(set(self._late.values()))
        for index in sorted(self._errors):
            raise self._errors[index]
        outcome.check(self._what, self._version)

    def _call_all(
        self, methods: Mapping[int, Method], call_of: Callable[[int, Method, bool], Method], deadline: float
    ) -> None:
        in_thread = {i for i, method in methods.items() if deadline < math.inf and not _takes_timeout(method)}
        # The threads start first, then come the calls on this thread, then the workers that are busy.
        for index in sorted(methods, key=lambda i: (not self._ready[i].idle_by(0.0), i not in in_thread)):
            state = self._ready[index]
            if not state.idle_by(deadline):
                del self._ready[index]
                self._late[index] = f"the transport of worker {index} is still busy with an earlier send"
                continue
            state.task = None  # the result of an earlier send, and the weights that it holds
            call = call_of(index, methods[index], index in in_thread)
            if index in in_thread:
                self._running[index] = self._ready.pop(index)
                state.task = Task(call)  # before it starts: an interrupt may come
                state.executor.put(state.task)
                continue
            try:
                call(**({} if deadline == math.inf else {"timeout": max(0.0, deadline - time.monotonic())}))
            except Exception as error:
                self._failed(index, error)
        # A worker that was busy until the deadline must not make the others late, whose calls have only just begun.
        self._take_results(max(deadline, time.monotonic() + GRACE) if in_thread & self._running.keys() else deadline)

    def _take_results(self, deadline: float) -> None:
        """Take the results of the calls that return by then."""
        for index, state in list(self._running.items()):
            if not state.idle_by(deadline):
                continue
            self._ready[index] = self._running.pop(index)
            task, state.task = state.task, None
            error = None if task is None else task.exception()
            if isinstance(error, Exception):
                self._failed(index, error)
            elif error is not None:
                raise error

    def _failed(self, index: int, error: Exception) -> None:
        del self._ready[index]
        if isinstance(error, TimeoutError):
            self._late[index] = f"worker {index}: {error}" if str(error) else f"worker {index} timed out"
        else:
            self._errors[index] = error


def _in_two_steps(transport: Any) -> bool:
    """Has it a method that sends and another one that waits for the answer?"""
    return hasattr(transport, "send_weights_async") and hasattr(transport, "wait_ack")


def _takes_timeout(method: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return any(each.name == "timeout" or each.kind is each.VAR_KEYWORD for each in parameters)


def _copied(weights: Any) -> Any:
    if isinstance(weights, (torch.Tensor, TensorDictBase)):
        return weights.detach().clone()
    if isinstance(weights, Mapping):
        return {key: _copied(value) for key, value in weights.items()}
    return weights
