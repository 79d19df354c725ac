"""The transport to one worker on another machine, with a sender and without."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from ...engine.timing import check_timeout, deadline_after
from .carrier import Carrier
from .parcel import Packer
from .requests import Answered, Call, Delivery, Destination


class RemoteTransport(Destination, ABC):
    """Reaches one worker.

    Args:
        carrier: for sends without a sender.
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits for ever.
    """

    def __init__(self, carrier: Carrier, timeout: float) -> None:
        self.timeout = check_timeout(timeout)
        self._carrier = carrier
        self._packer = Packer(carrier.piece_bytes)
        self._sent = 0
        self._pending: tuple[Delivery, str] | None = None
        self.key: Any = None  # by which its sender's Roster knows the worker

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Is there somebody to send to? Else every call does nothing."""

    @abstractmethod
    def start_call(self, payload: Any) -> Call:
        """Send the carrier's payload, or an Announcement. The answer means that the worker has applied it."""

    def post(self, payload: Any) -> Call:
        """Send it if there is somebody to send to."""
        return self.start_call(payload) if self.connected else Answered()

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send a TensorDict or a dict, and wait until the worker has applied it.

        Raises WorkerDied, AckTimeout, the worker's own exception, RuntimeError for an answer that is none.
        """
        self.send_weights_async(model_id, weights)
        self.wait_ack()

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Send, or as long as an earlier send is not answered, wait with that for wait_ack()."""
        delivery = Delivery(self._carrier.wait)
        if self.connected:
            self._sent += 1
            payload = self._carrier.payload(self._packer.pack(weights, model_id, self._sent))
            delivery.ask(0, self, partial(self.post, payload))
        self._pending = delivery, model_id

    def wait_ack(self) -> None:
        """Wait for the last send_weights_async(). Raises RuntimeError when there was none, and as send_weights()."""
        if self._pending is None:
            raise RuntimeError("no send is pending; call send_weights_async() first")
        (delivery, model_id), self._pending = self._pending, None
        delivery.finish(deadline_after(None, self.timeout))
        delivery.check(f"the weights of {model_id!r}", None, {0: self})

    def receive_weights(self, timeout: float = 1.0) -> tuple[str, Any] | None:
        """None: the worker gets weights as an argument of a call."""
        return None

    def send_ack(self, message: str = "updated") -> None:
        """Does nothing: the call's return is the answer."""

    def check_ack(self, message: str = "updated") -> None:
        """Does nothing: wait_ack() waits for the call's return."""

    def check_connection(self) -> bool:
        """Can this process send?"""
        return True

    def close(self) -> None:
        """Give back what the transport holds. Idempotent."""
