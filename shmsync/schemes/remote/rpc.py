"""Weights for workers of torch.distributed.rpc.

A send is one rpc_async() for each worker, which runs `collector_class.update_policy_weights_(rref, weights)` there; the
weights travel as its argument, in some pieces (packing.py). The call's future is the answer: it is there when that
method has returned. What the agent reports of a dead worker is raised as WorkerDied.
"""

from __future__ import annotations

from concurrent import futures
from typing import Any

import torch
from typing_extensions import override

from ...engine.outcome import Failure
from ...errors import ProtocolError
from ..context import Arguments
from .base import Dead, Failed, RemoteScheme, RemoteTransport


class RPCWeightSyncScheme(RemoteScheme):
    """Weights go to RPC workers, as an argument of `update_policy_weights_(rref, weights)`.

    That is a method of the user's `collector_class`; it gives them to the receiver's apply_weights(). The options are
    those of RemoteScheme.

    init_on_sender() takes `collector_infos` and `collector_rrefs` (lists), `collector_class`, and `model` (or
    `source_model`); each as an argument or by the context, which is held weakly. It raises ValueError for missing or
    contradictory ones.
    """

    @override
    def create_transport(self, pipe_or_context: Any = None) -> RPCTransport:
        """The transport to a worker, given as (info, rref, class)."""
        return RPCTransport(*(pipe_or_context or ()), timeout=self.timeout)

    @override
    def workers(self, arguments: Arguments) -> list[tuple[Any, Any, Any]]:
        infos, rrefs = arguments.needed("collector_infos"), arguments.needed("collector_rrefs")
        collector_class = arguments.needed("collector_class")
        if len(infos) != len(rrefs):
            raise ValueError(
                f"there are {len(infos)} collector_infos but {len(rrefs)} collector_rrefs; give both for each worker"
            )
        return [(info, rref, collector_class) for info, rref in zip(infos, rrefs, strict=True)]


class RPCTransport(RemoteTransport):
    """Reaches one object of an RPC worker.

    Args:
        collector_info: the worker: its WorkerInfo or its name. None: every call does nothing.
        collector_rref: a reference to the object. None: every call does nothing.
        collector_class: its class; `collector_class.update_policy_weights_(collector_rref, weights)` runs on the
            worker.
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits without limit, None is 60.
    """

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        *,
        timeout: float | None = None,
    ) -> None:
        super().__init__(timeout)
        self.info, self.rref, self.collector_class = collector_info, collector_rref, collector_class

    @property
    @override
    def connected(self) -> bool:
        return self.info is not None and self.rref is not None

    @override
    def start(self, content: Any) -> futures.Future[Any]:
        from torch.distributed import rpc

        if not self.check_connection():
            raise ProtocolError("this process has no RPC agent; call torch.distributed.rpc.init_rpc() before you send")
        args = self.collector_class.update_policy_weights_, self.rref, content
        try:
            # No time-out here: until the answer is there, the agent may still read the buffer that is sent.
            sent = rpc.rpc_async(self.info, run_there, args=args, timeout=0)
        except RuntimeError as error:
            raise self._dead(error) from error
        answered: futures.Future[Any] = futures.Future()
        # A closure that keeps the arguments: the buffer is not used again before the answer is there.
        sent.add_done_callback(lambda done, kept=args: answered.set_result(done))
        return answered

    @override
    def answer(self, request: futures.Future[Any]) -> None:
        try:
            failure = request.result().wait()
        except RuntimeError as error:  # the agent's own
            raise self._dead(error) from error
        except Exception as error:  # the other side has no such function or class
            raise Failed(Failure(None, None, str(error).partition("\n")[0], str(error))) from error
        if failure is not None:
            raise Failed(failure)

    def _dead(self, error: BaseException) -> Dead:
        name = getattr(self.info, "name", self.info)
        return Dead(f"RPC worker {name}: {error}")

    @override
    def check_connection(self) -> bool:
        """Does this process have an RPC agent?"""
        from torch.distributed import rpc

        return bool(rpc.is_available() and rpc.api._is_current_rpc_agent_set())


def run_there(method: Any, rref: Any, weights: Any) -> Failure | None:
    """On the worker: method(rref, weights). An exception is returned, since torch keeps neither its type nor cause."""
    try:
        returned = method(rref, weights)
        if isinstance(returned, torch.futures.Future):  # of rpc.functions.async_execution
            returned.wait()
    except Exception as error:
        return Failure.of(error)
    return None
