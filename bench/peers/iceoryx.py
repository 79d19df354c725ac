"""iceoryx2: a sample of publish-subscribe for each version, and an event that wakes the workers.

A worker copies the sample into its own tensors and gives it back, or keeps it and uses it as it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import iceoryx2
import torch

from peers import session


def node_of(owner: int, folder: str) -> Any:
    """A node of the trainer with this pid, apart from all other users of iceoryx2 on the machine."""
    iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
    config = iceoryx2.config.default()
    config.global_cfg.prefix = iceoryx2.FileName.new(session.FILES.format(pid=owner))
    config.global_cfg.root_path = iceoryx2.Path.new(folder)
    builder = iceoryx2.NodeBuilder.new().config(config)
    return builder.signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled).create(iceoryx2.ServiceType.Ipc)


def services_of(node: Any) -> tuple[Any, Any]:
    weights = node.service_builder(iceoryx2.ServiceName.new("weights"))
    wakes = node.service_builder(iceoryx2.ServiceName.new("wakes"))
    data = weights.publish_subscribe(iceoryx2.Slice[ctypes.c_uint8]).payload_alignment(iceoryx2.Alignment.new(64))
    return data.open_or_create(), wakes.event().open_or_create()


def leaves_of(payload: Any, sizes: list[int]) -> list[torch.Tensor]:
    """The leaves lie one after the other in the payload."""
    memory = (ctypes.c_float * sum(sizes)).from_address(payload.as_ptr())
    return list(torch.frombuffer(memory, dtype=torch.float32).split(sizes))


class CopyingReader(session.Reader):
    def __init__(self, pipe: Connection, hold: Any, owner: int, folder: str, sizes: list[int]) -> None:
        super().__init__(pipe, hold)
        self.sizes, self.own = sizes, [torch.empty(size) for size in sizes]
        self.node = node_of(owner, folder)
        data, wakes = services_of(self.node)
        self.subscriber = data.subscriber_builder().create()
        self.listener = wakes.listener_builder().create()
        self.services = data, wakes
        pipe.send_bytes(b"attached")

    def wait(self) -> None:
        self.sample = None
        while (sample := self.subscriber.receive()) is None:
            self.listener.blocking_wait()
        self.sample = sample

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        torch._foreach_copy_(self.own, leaves_of(self.sample.payload(), self.sizes))
        self.hold()
        self.sample = None
        yield self.own


class ViewingReader(CopyingReader):
    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        yield leaves_of(self.sample.payload(), self.sizes)


class Copies(session.Session):
    reader: type[session.Reader] = CopyingReader

    def start(self) -> None:
        folder = os.environ["TMPDIR"] + f"/iceoryx2-{os.getpid()}"
        self.sizes = [leaf.numel() for leaf in self.leaves]
        self.node = node_of(os.getpid(), folder)
        self.data, self.wakes = services_of(self.node)
        self.nbytes = 4 * sum(self.sizes)
        self.publisher = self.data.publisher_builder().initial_max_slice_len(self.nbytes).create()
        self.notifier = self.wakes.notifier_builder().create()
        self.crew = session.Crew(self.reader, [(os.getpid(), folder, self.sizes)] * self.count, self.folder)
        for pipe in self.crew.pipes:
            pipe.recv_bytes()  # a subscriber gets what is sent after it is attached

    def send(self) -> None:
        sample = self.publisher.loan_slice_uninit(self.nbytes)
        torch._foreach_copy_(leaves_of(sample.payload(), self.sizes), self.leaves)
        sample.assume_init().send()
        self.notifier.notify()

    def close(self) -> None:
        super().close()
        for name in ("publisher", "notifier", "data", "wakes", "node"):
            delattr(self, name)


class Views(Copies):
    reader = ViewingReader
