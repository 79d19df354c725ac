"""Weights for workers of torch.distributed.rpc."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Collection
from functools import partial
from typing import Any

from typing_extensions import override

from ....engine.outcome import Failure
from ....errors import ProtocolError
from ...context_args import Arguments
from ...link.serial_executor import SerialExecutor
from ...link.timed_queue import TimedQueue
from ..location import here
from ..relay import RelayOptions, close_here, publish_here
from ..remote_carrier import Carrier
from ..remote_requests import Call, Failed, Gone
from ..remote_scheme import RemoteScheme, Roster
from ..remote_transport import RemoteTransport

_keys = itertools.count()
_under_way: dict[int, tuple[Any, ...]] = {}  # arguments of the calls that are not answered
# Queues that wake the waits for these calls. Conditions may stay locked after an interrupt.
_bells: dict[int, TimedQueue[None]] = {}
_executor = SerialExecutor()  # begins calls


class RPCCall(Call):
    """A remote procedure call under way."""

    def __init__(self, to: Any, function: Any, args: tuple[Any, ...]) -> None:
        self.payload = args
        self._name = getattr(to, "name", to)
        if not has_agent():
            raise ProtocolError("this process has no RPC agent; call torch.distributed.rpc.init_rpc() before you send")
        # An interrupt may lose this object before the caller has it; the agent reads the buffer all the same.
        key = self.key = next(_keys)
        _under_way[key] = args
        self._future: Any = None
        # Not on this thread: torch unpickles an answer that is already there, and takes a Ctrl-C in that for it.
        self._started = _executor.give(partial(self._start, to, function, args))

    def _start(self, to: Any, function: Any, args: tuple[Any, ...]) -> None:
        from torch.distributed import rpc

        try:
            # No time-out here: until the answer is there, the agent may still read the buffer that is sent.
            future = rpc.rpc_async(to, function, args=args, timeout=0)
        except BaseException as error:
            _answered(self.key, None)
            if isinstance(error, RuntimeError):
                raise Gone(self._explain(error)) from error
            raise
        self._future = future
        future.add_done_callback(partial(_answered, self.key))

    @override
    def finished(self) -> bool:
        if not self._started.done():
            return False
        return self._future is None or bool(self._future.done())

    @override
    def result(self) -> Any:
        if self._future is None:
            self._started.result()  # raises
        try:
            answer = self._future.wait()
        except Exception as error:
            if "On WorkerInfo(" in str(error):  # how torch marks what the other side raised
                raise Failed(Failure(None, None, str(error).splitlines()[0], str(error))) from error
            raise Gone(self._explain(error)) from error
        if isinstance(answer, Failure):
            raise Failed(answer)
        return answer

    def _explain(self, error: BaseException) -> str:
        return f"RPC worker {self._name}: {' '.join(str(error).split())[:200]}"


def run_there(function: Any, to: Any, weights: Any) -> Any:
    """On the worker: function(to, weights). publish_here()'s answer is returned; what a user's method returns is not.

    An exception is returned, with its traceback: torch keeps neither its type nor that.
    """
    try:
        answer = function(to, weights)
        return answer if function is publish_here else None
    except Exception as error:
        return Failure.of(error)


def _answered(key: int, _future: Any) -> None:
    _under_way.pop(key, None)
    bell = _bells.pop(key, None)
    if bell is not None:
        bell.put(None)


def has_agent() -> bool:
    """Can this process make remote calls?"""
    from torch.distributed import rpc

    return bool(rpc.api._is_current_rpc_agent_set())


class RPCCarrier(Carrier):
    """Remote procedure calls. The relay of a node is the first of its workers that lives."""

    @override
    def wait(self, calls: Collection[Call], seconds: float) -> None:
        bell: TimedQueue[None] = TimedQueue()
        keys = [call.key for call in calls if isinstance(call, RPCCall)]
        _bells.update(dict.fromkeys(keys, bell))
        try:
            if not any(call.finished() for call in calls):
                with contextlib.suppress(queue.Empty):
                    bell.get(seconds)
        finally:
            for key in keys:
                _bells.pop(key, None)

    @override
    def locate(self, worker: RPCTransport) -> Call:
        return RPCCall(worker.info, here, ())

    @override
    def relay_call(self, relay: Any, payload: Any, options: RelayOptions) -> Call:
        return RPCCall(relay.host.info, run_there, (publish_here, options, payload))

    @override
    def close_relay(self, relay: Any, session: str, *, until: float | None) -> None:
        if has_agent() and not relay.host.dead:
            with contextlib.suppress(Gone):
                call = RPCCall(relay.host.info, partial(close_here, ended=until is not None), (session,))
                # For a moment: the agent may be shut down next, and the arena is to be gone before.
                while until is not None and not call.finished() and time.monotonic() < until:
                    self.wait([call], 0.05)


class RPCTransport(RemoteTransport):
    """Reaches one object of an RPC worker.

    Args:
        collector_info: the worker: its WorkerInfo or its name. None: every call does nothing.
        collector_rref: a reference to the object. None: every call does nothing.
        collector_class: its class; `collector_class.update_policy_weights_(collector_rref, weights)` runs on the
            worker.
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits without limit.
    """

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        *,
        timeout: float | None = 60.0,
    ) -> None:
        super().__init__(RPCCarrier(), timeout)
        self.info = collector_info
        self.rref = collector_rref
        self.collector_class = collector_class

    @property
    @override
    def connected(self) -> bool:
        return self.info is not None and self.rref is not None

    @override
    def start_call(self, payload: Any) -> Call:
        method = self.collector_class.update_policy_weights_
        if hasattr(method, "_wrapped_async_rpc_function"):  # the agent there waits for what the method returns
            return RPCCall(self.info, method, (self.rref, payload))
        return RPCCall(self.info, run_there, (method, self.rref, payload))

    @override
    def check_connection(self) -> bool:
        """Does this process have an RPC agent?"""
        return has_agent()


class RPCWeightSyncScheme(RemoteScheme):
    """Weights go to RPC workers, as an argument of `update_policy_weights_(rref, weights)`.

    That is a method of the user's `collector_class`; it gives them to the receiver's apply_weights().

    Args:
        strategy: see RemoteScheme.
        fan_out: see RemoteScheme. The relay of a node is one of its workers.
        slots: see RemoteScheme.
        consistency: see RemoteScheme.
        timeout: see RemoteScheme.

    init_on_sender() takes `collector_infos` and `collector_rrefs` (lists, read again at each send), `collector_class`,
    and `model` (or `source_model`); each as an argument or by the context, which is held weakly. It raises ValueError
    for missing or contradictory ones.
    """

    sender_takes = RemoteScheme.sender_takes | {"collector_infos", "collector_rrefs", "collector_class"}

    @override
    def create_transport(self, pipe_or_context: Any) -> RPCTransport:
        """The transport to a worker, given as (info, rref, class)."""
        triple = pipe_or_context if isinstance(pipe_or_context, tuple) else (pipe_or_context,)
        if len(triple) not in (1, 3):
            raise ValueError(f"an RPC worker is given as (info, rref, class), not as {len(triple)} things")
        return RPCTransport(*triple, timeout=self.timeout)

    @override
    def create_carrier(self) -> RPCCarrier:
        return RPCCarrier()

    @override
    def roster(self, arguments: Arguments) -> Roster:
        names = ("collector_infos", "collector_rrefs", "collector_class")
        for name in names:
            arguments.needed(name)
        readers = [arguments.reader(name) for name in names]

        def read() -> list[tuple[Any, Any, Any]] | None:
            infos, rrefs, collector_class = (reader() for reader in readers)
            if infos is None or rrefs is None or collector_class is None:
                return None
            if len(infos) != len(rrefs):
                raise ValueError(
                    f"there are {len(infos)} collector_infos but {len(rrefs)} collector_rrefs; give both for each "
                    "worker"
                )
            return [(info, rref, collector_class) for info, rref in zip(infos, rrefs, strict=True)]

        return Roster(read, "collector_infos", live=True, key=lambda address: id(address[1]))
