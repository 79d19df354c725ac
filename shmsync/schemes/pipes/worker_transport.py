"""One worker of a sender, as a transport: what the hook _iterate_transports() yields over pipes."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from ..link.sender_end import Link
from .pipe_carrier import PipeCarrier
from .pipe_transport import PipeTransport


class WorkerTransport(PipeTransport):
    """Sends to one of the workers that a sender has, with what that sender sends with."""

    def __init__(self, carrier: PipeCarrier, index: int, link: Link, timeout: float) -> None:
        super().__init__(link.pipe, timeout, carrier)
        self.worker_idx = index
        self.link = link

    @override
    def _links(self) -> dict[int, Link]:
        return {self.worker_idx: self.link}

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """None: this end of the pipe is the sender's."""
        return None

    @override
    def check_connection(self) -> bool:
        """Are both ends open, and is the worker alive, as far as is known?"""
        return not (self.link.end.channel.closed or self.link.end.channel.ended or self.link.dead)
