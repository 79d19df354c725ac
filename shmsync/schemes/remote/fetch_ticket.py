"""What a worker is sent in place of weights that it fetches itself, over a connection of ours or from shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...memory.slab.memfd import MemfdAt
from .location import Place
from .packed_weights import Label

TAKE, LEASE, DONE = 1, 2, 3  # what a worker asks: for the bytes; to read where they lie; and that it has read them
ABSENT = -1  # the answer where they have been given up; else it is their number


class Unreached(ConnectionError):
    """The worker cannot reach the sender's weight server, so the weights have to come by the network's own means."""


class WeightServerAddress(NamedTuple):
    """The address of a sender's weight server. The network's own means carry the key, never a connection of ours."""

    host: str
    port: int
    key: bytes
    maker: Place  # whose weight server it is


class FetchTicket(NamedTuple):
    """For weights in a weight server.

    where: gives the location of the calling process, in the same terms as the weight server's maker.
    memory: where they lie, for who shares memory with the sender.
    seconds: that the send had left when the ticket was made.
    """

    weight_server: WeightServerAddress
    number: int
    label: Label
    size: int
    memory: MemfdAt
    where: Callable[[], Place]
    seconds: float
