"""Weights for workers of torch.distributed.rpc."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ...engine.outcome import Failure
from ...errors import ProtocolError
from ..lookup import Arguments
from .fan_out import FanOut, HostedFanOut, Site
from .place import here
from .relay import RelayOptions, close_here, publish_here
from .requests import Answered, Call, Destination, Failed, Gone
from .scheme import RemoteScheme, RemoteSender
from .transport import RemoteTransport

# RPC receives each tensor into fresh memory. Up to this size the allocator keeps it for the next send; beyond, the
# kernel clears new pages each time, which takes longer than the transfer.
PIECE_BYTES = 8 << 20
_ROSTER = ("collector_infos", "collector_rrefs", "collector_class")
_keys = itertools.count()
_under_way: dict[int, tuple[Any, ...]] = {}  # arguments of the calls that are not answered
# Some call of this process was answered. A Condition may stay locked after an interrupt.
_news: queue.SimpleQueue[None] = queue.SimpleQueue()


class RPCCall(Call):
    """A remote procedure call under way."""

    def __init__(self, to: Any, function: Any, args: tuple[Any, ...]) -> None:
        from torch.distributed import rpc

        self.payload = args
        self._name = getattr(to, "name", to)
        if not has_agent():
            raise ProtocolError("this process has no RPC agent; call torch.distributed.rpc.init_rpc() before you send")
        # An interrupt may lose this object before anybody has it; the agent reads the buffer all the same.
        key = next(_keys)
        _under_way[key] = args
        try:
            # No time-out of its own: until the answer is there, the agent may still read the buffer that is sent.
            self._future = rpc.rpc_async(to, function, args=args, timeout=0)
        except RuntimeError as error:
            _under_way.pop(key, None)
            raise Gone(self._explain(error)) from error
        self._future.add_done_callback(partial(_answered, key))

    def finished(self) -> bool:
        """As in Call."""
        return bool(self._future.done())

    def result(self) -> Any:
        """As in Call."""
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


def apply_there(method: Any, rref: Any, weights: Any) -> Failure | None:
    """On the worker: update_policy_weights_(). What it returns stays there."""
    return run_there(_discard, method, rref, weights)


def _discard(method: Any, *args: Any) -> None:
    method(*args)


def run_there(function: Any, *args: Any) -> Any:
    """On the worker: call it. An exception is returned, with its traceback: torch keeps neither its type nor that."""
    try:
        return function(*args)
    except Exception as error:
        return Failure.of(error)


def _answered(key: int, _future: Any) -> None:
    _under_way.pop(key, None)
    _news.put(None)


def wait(calls: Collection[Call], seconds: float) -> None:
    """Until one of these calls is finished, but no longer than that."""
    while not _news.empty():
        with contextlib.suppress(queue.Empty):
            _news.get_nowait()
    if not any(call.finished() for call in calls):
        with contextlib.suppress(queue.Empty):  # another thread may take it: then it takes a slice longer
            _news.get(timeout=seconds)


def has_agent() -> bool:
    """Can this process make remote calls?"""
    from torch.distributed import rpc

    return bool(rpc.api._is_current_rpc_agent_set())


class RPCTransport(RemoteTransport):
    """Reaches one object of an RPC worker.

    Args:
        collector_info: the worker: its WorkerInfo or its name. None: every call does nothing.
        collector_rref: a reference to the object. None: every call does nothing.
        collector_class: its class; `collector_class.update_policy_weights_(collector_rref, weights)` runs on the
            worker.
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits for ever.
    """

    piece_bytes = PIECE_BYTES

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        *,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(timeout)
        self.info = collector_info
        self.rref = collector_rref
        self.collector_class = collector_class

    @property
    def connected(self) -> bool:
        """As in RemoteTransport."""
        return self.info is not None and self.rref is not None

    def post(self, payload: Any) -> Call:
        """Call the worker's method with a parcel or an announcement."""
        if not self.connected:
            return Answered()
        method = self.collector_class.update_policy_weights_
        if hasattr(method, "_wrapped_async_rpc_function"):  # it returns a future, which the agent there waits for
            return RPCCall(self.info, method, (self.rref, payload))
        return RPCCall(self.info, apply_there, (method, self.rref, payload))

    def _wait(self, calls: Collection[Call], seconds: float) -> None:
        wait(calls, seconds)

    def check_connection(self) -> bool:
        """Does this process have an RPC agent?"""
        return has_agent()


class RPCWeightSyncScheme(RemoteScheme):
    """Weights go to RPC workers, as an argument of `update_policy_weights_(rref, weights)` of a class of the user's,
    which gives them to the receiver's apply_weights().

    Args:
        strategy, fan_out, slots, consistency, timeout: as in RemoteScheme. The relay of a node is one of its workers.
    """

    def init_on_sender(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Prepare to send the model of this id.

        Args:
            context: gives `.collector_infos`, `.collector_rrefs` (lists, which are read again at each send) and
                `.collector_class`. Held weakly.
            **kwargs: the same names, and `model` (or `source_model`), instead or beside it.

        Raises ValueError for missing or contradictory ones.
        """
        super().init_on_sender(model_id, context, **kwargs)

    def create_transport(self, pipe_or_context: Any) -> RPCTransport:
        """The transport to a worker, given as (info, rref, class)."""
        triple = pipe_or_context if isinstance(pipe_or_context, tuple) else (pipe_or_context,)
        if len(triple) not in (1, 3):
            raise ValueError(f"an RPC worker is given as (info, rref, class), not as {len(triple)} things")
        return RPCTransport(*triple, timeout=self.timeout)

    def create_sender(self) -> RPCSender:
        """As in WeightSyncScheme."""
        return RPCSender(self)


class RPCSender(RemoteSender):
    """Sends to RPC workers."""

    _scheme: RPCWeightSyncScheme
    _piece_bytes = PIECE_BYTES
    _roster: Any = None

    def set_up(self, arguments: Arguments) -> None:
        """As in RemoteSender."""
        super().set_up(arguments)
        infos, *_ = given = [arguments.needed(name) for name in _ROSTER]
        self._check_count(arguments, len(infos), "collector_infos")
        self._roster = given
        self._register_all(*given)

    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        """As in WeightSender, where there are no lists of workers. Raises ValueError where there are."""
        if self._roster is not None:
            raise ValueError("the workers are those of collector_infos and collector_rrefs; put this one into those")
        super().register_worker(worker_idx, pipe_or_context, process)

    def _update_roster(self) -> None:
        roster = [getattr(self._context, name, None) for name in _ROSTER]
        roster = self._roster if None in roster else roster
        if roster is not None:
            self._register_all(*roster)

    def _register_all(self, infos: Sequence[Any], rrefs: Sequence[Any], collector_class: Any) -> None:
        if len(infos) != len(rrefs):
            raise ValueError(
                f"there are {len(infos)} collector_infos but {len(rrefs)} collector_rrefs; give both for each worker"
            )
        known = {id(transport.rref): transport for transport in self._transports.values()}
        self._transports = {
            index: known.get(id(rref)) or self._scheme.create_transport((info, rref, collector_class))
            for index, (info, rref) in enumerate(zip(infos, rrefs, strict=True))
        }

    def _wait(self, calls: Collection[Call], seconds: float) -> None:
        wait(calls, seconds)

    def _make_fan_out(self) -> FanOut:
        return RPCFanOut(self._relay_options, self._packer.session)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_roster": None}


class RPCRelay(Destination):
    """A relay inside one of the node's workers."""

    def __init__(self, host: RPCTransport, options: RelayOptions) -> None:
        self.host = host
        self.options = options

    def post(self, payload: Any) -> Call:
        """Give it a parcel."""
        return RPCCall(self.host.info, run_there, (publish_here, self.options, payload))


class RPCFanOut(HostedFanOut):
    """Relays are inside RPC workers."""

    def locate(self, worker: Destination) -> Call:
        """As in FanOut."""
        assert isinstance(worker, RPCTransport)
        return RPCCall(worker.info, here, ()) if worker.connected else Answered(here())

    def make_relay(self, site: Site, members: Mapping[int, Destination]) -> Destination:
        """As in FanOut."""
        first = members[min(members)]
        assert isinstance(first, RPCTransport)
        return RPCRelay(first, self.options)

    def host(self, relay: Destination) -> Destination:
        """As in HostedFanOut."""
        assert isinstance(relay, RPCRelay)
        return relay.host

    def close_relay(self, relay: Destination, *, ended: bool) -> None:
        """As in FanOut."""
        assert isinstance(relay, RPCRelay)
        if has_agent() and not relay.host.dead:
            with contextlib.suppress(Gone):
                call = RPCCall(relay.host.info, partial(close_here, ended=ended), (self._session,))
                # For a moment: the agent may be shut down next, and the arena is to be gone before.
                deadline = time.monotonic() + (2.0 if ended else 0.0)
                while not call.finished() and time.monotonic() < deadline:
                    wait([call], 0.05)
