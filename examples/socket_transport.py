"""A transport of your own: weights over plain TCP connections. docs/schemes.md explains it.

Connections are those of multiprocessing.connection: only processes with the same authkey are let in, since a process
that is let in can run code here, as always with pickle.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from torch import nn

import shmsync


class SocketTransport:
    """One end of a connection, the trainer's or a worker's."""

    def __init__(self, connection: Connection, timeout: float = 10.0) -> None:
        self._connection = connection
        self._timeout = timeout
        self._number = 0  # of the newest message

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        self._number += 1
        self._connection.send_bytes(pickle.dumps((self._number, model_id, weights)))

    def wait_ack(self) -> None:
        deadline = time.monotonic() + self._timeout
        while self._connection.poll(max(0.0, deadline - time.monotonic())):
            if self._connection.recv() == self._number:  # else a late answer to an earlier message
                return
        raise TimeoutError(f"no answer within {self._timeout:g} seconds")

    def send_weights(self, model_id: str, weights: Any) -> None:
        self.send_weights_async(model_id, weights)
        self.wait_ack()

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        if not self._connection.poll(timeout):
            return None
        self._number, model_id, weights = pickle.loads(self._connection.recv_bytes())
        return model_id, weights

    def send_ack(self, message: str = "updated") -> None:
        self._connection.send(self._number)


class SocketWeightSyncScheme(shmsync.WeightSyncScheme):
    """`pipes` and `pipe` are connections."""

    def create_transport(self, pipe_or_context: Any) -> SocketTransport:
        return SocketTransport(pipe_or_context)


def work(address: tuple[str, int], index: int) -> None:
    model = nn.Linear(4, 2)
    with Client(address, authkey=multiprocessing.current_process().authkey) as connection:
        scheme = SocketWeightSyncScheme()
        scheme.init_on_worker("policy", model=model, pipe=connection, worker_idx=index)
        scheme.get_receiver().receive(timeout=60.0)
    print(f"worker {index} has weight {float(model.weight.detach()[0, 0]):g}", flush=True)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with Listener(("127.0.0.1", 0), authkey=multiprocessing.current_process().authkey) as listener:
        workers = [context.Process(target=work, args=(listener.address, index)) for index in range(2)]
        for worker in workers:
            worker.start()
        connections = [listener.accept() for _ in workers]
    policy = nn.Linear(4, 2)
    nn.init.constant_(policy.weight, 3.0)
    scheme = SocketWeightSyncScheme()
    scheme.init_on_sender("policy", pipes=connections, model=policy)
    print("sent version", scheme.get_sender().send(), flush=True)
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
