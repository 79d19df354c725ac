"""Weights over plain TCP connections: a whole scheme for several machines in one file.

docs/add-a-transport.md explains it. A worker calls serve() and gives its address to the trainer, which passes all of
them to init_on_sender(addresses=...). Connections are those of multiprocessing.connection: only processes with the same
authkey are let in, since a process that is let in can run code there, as always with pickle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from torch import nn

from shmsync.engine.outcome import Failure
from shmsync.schemes.context_args import Arguments
from shmsync.schemes.link.serial_executor import SerialExecutor, Task
from shmsync.schemes.remote.location import Site, here
from shmsync.schemes.remote.packed_weights import PackedWeights
from shmsync.schemes.remote.relay import RelayOptions, close_here, publish_here
from shmsync.schemes.remote.remote_carrier import Carrier, HostedRelay
from shmsync.schemes.remote.remote_requests import Call, Failed, Gone
from shmsync.schemes.remote.remote_scheme import RemoteScheme, Roster
from shmsync.schemes.remote.remote_transport import RemoteTransport

# ---- in a worker


def serve(apply: Callable[[Any], None], host: str = "127.0.0.1") -> tuple[str, int]:
    """Call apply(weights), on a thread, for what trainers send from now on. Returns the address to give them."""
    listener = Listener((host, 0), backlog=64, authkey=multiprocessing.current_process().authkey)
    threading.Thread(target=_accept, args=(listener, apply), daemon=True).start()
    return listener.address


def _accept(listener: Listener, apply: Callable[[Any], None]) -> None:
    while True:
        with contextlib.suppress(OSError, EOFError, multiprocessing.AuthenticationError):
            connection = listener.accept()
            threading.Thread(target=_answer, args=(connection, apply), daemon=True).start()


def _answer(connection: Connection, apply: Callable[[Any], None]) -> None:
    """Answer one connection's requests, each with a result or a Failure, until it ends."""
    actions: dict[str, Callable[..., Any]] = {
        "apply": lambda packed: apply(pickle.loads(packed)),
        "relay": lambda packed, options: publish_here(options, pickle.loads(packed)),
        "location": here,
        "close": lambda session, ended: close_here(session, ended=ended),
    }
    with connection, contextlib.suppress(OSError, EOFError):
        while True:
            action, *arguments = connection.recv()
            try:
                act = actions[action]
                answer = act(*arguments)
            except Exception as error:
                answer = Failure.of(error)
            connection.send(answer)


# ---- in the trainer


class SocketCall(Call):
    """A request under way: what a thread does with a connection."""

    def __init__(self, task: Task, address: tuple[str, int]) -> None:
        self._task = task
        self._address = address

    def finished(self) -> bool:
        return self._task.done()

    def result(self) -> Any:
        try:
            answer = self._task.result()
        except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
            raise Gone("{}:{}: {}".format(*self._address, error or "the connection ended")) from error
        if isinstance(answer, Failure):
            raise Failed(answer)
        return answer


class Wire:
    """A connection to a worker, and a thread that waits there: a stopped worker keeps the thread, not the trainer."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._connection: Connection | None = None
        self._executor = SerialExecutor()

    def ask(self, *request: Any) -> SocketCall:
        return SocketCall(self._executor.give(partial(self._exchange, request)), self._address)

    def _exchange(self, request: tuple[Any, ...]) -> Any:
        if self._connection is None:
            self._connection = Client(self._address, authkey=multiprocessing.current_process().authkey)
        self._connection.send(request)
        return self._connection.recv()

    def close(self) -> None:
        self._executor.close()


class SocketTransport(RemoteTransport):
    """Reaches the worker at this address; None: every call does nothing."""

    def __init__(self, address: tuple[str, int] | None = None, *, timeout: float = 60.0) -> None:
        super().__init__(SocketCarrier(), timeout)
        self.address = address
        self.wire = Wire(address) if address is not None else None

    @property
    def connected(self) -> bool:
        return self.wire is not None

    def start_call(self, payload: Any) -> Call:
        return self.wire.ask("apply", payload if isinstance(payload, bytes) else pickle.dumps(payload))

    def close(self) -> None:
        if self.wire is not None:
            self.wire.close()


class SocketRelay(HostedRelay):
    """A relay in a worker, over a separate connection: the worker answers each connection on its own thread."""

    def __init__(self, host: SocketTransport) -> None:
        super().__init__(host)
        self.wire = Wire(host.address)


class SocketCarrier(Carrier):
    """TCP connections. The relay of a node is the first of its workers that lives."""

    def payload(self, packed_weights: PackedWeights, deadline: float) -> bytes:
        return pickle.dumps(
            PackedWeights(packed_weights.label, [piece.numpy() for piece in packed_weights.pieces]), protocol=5
        )

    def locate(self, worker: SocketTransport) -> Call:
        return worker.wire.ask("location")

    def start_relay(self, site: Site, members: Mapping[int, SocketTransport], options: RelayOptions) -> SocketRelay:
        return SocketRelay(members[min(members)])

    def relay_call(self, relay: SocketRelay, payload: bytes, options: RelayOptions) -> Call:
        return relay.wire.ask("relay", payload, options)

    def close_relay(self, relay: SocketRelay, session: str, *, until: float | None) -> None:
        call = relay.wire.ask("close", session, until is not None)
        if until is not None:
            self.wait([call], until - time.monotonic())
        relay.wire.close()


class SocketWeightSyncScheme(RemoteScheme):
    """Weights go to workers that serve(), which give them to the receiver's apply_weights()."""

    def create_transport(self, pipe_or_context: Any) -> SocketTransport:
        return SocketTransport(pipe_or_context, timeout=self.timeout)

    def create_carrier(self) -> SocketCarrier:
        return SocketCarrier()

    def roster(self, arguments: Arguments) -> Roster:
        arguments.needed("addresses")
        return Roster(arguments.reader("addresses"), "addresses", live=True)


# ---- a program


def work(scheme: SocketWeightSyncScheme, index: int, pipe: Connection) -> None:
    model = nn.Linear(4, 2)
    scheme.init_on_worker("policy", model=model, worker_idx=index)
    receiver = scheme.get_receiver()
    pipe.send(serve(receiver.apply_weights))
    receiver.receive(timeout=60.0)  # weights are applied when they come; this waits for it
    print(f"worker {index} has version {receiver.version}, weight {float(model.weight.detach()[0, 0]):g}", flush=True)
    pipe.recv()
    scheme.shutdown()


def main() -> None:
    scheme = SocketWeightSyncScheme(fan_out="node")
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for index in range(2):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        workers.append(context.Process(target=work, args=(scheme, index, theirs)))
        workers[-1].start()
    policy = nn.Linear(4, 2)
    nn.init.constant_(policy.weight, 3.0)
    scheme.init_on_sender("policy", addresses=[pipe.recv() for pipe in pipes], model=policy)
    print("sent version", scheme.get_sender().send(), flush=True)
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send("go")
        worker.join()
    scheme.shutdown()


if __name__ == "__main__":
    main()
