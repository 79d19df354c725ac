"""What the transports to other machines have in common when they are used without a sender."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from ...engine.timing import check_timeout, deadline_after
from .parcel import Packer, Parcel
from .requests import Call, Delivery, Destination


class RemoteTransport(Destination):
    """Reaches one worker.

    Args:
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits for ever.
    """

    piece_bytes: int | None = None  # see Packer

    def __init__(self, timeout: float) -> None:
        self.timeout = check_timeout(timeout)
        self._packer = Packer(self.piece_bytes)
        self._sent = 0
        self._pending: tuple[Delivery, str] | None = None

    # What the kinds of transports do differently.

    @property
    def connected(self) -> bool:
        """Is there somebody to send to? Else every call does nothing."""
        raise NotImplementedError

    def _payload(self, parcel: Parcel) -> Any:
        """What is posted."""
        return parcel

    def _wait(self, calls: Collection[Call], seconds: float) -> None:
        """Until one of these calls is finished, but no longer than that."""
        raise NotImplementedError

    # TransportBackend.

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Send a TensorDict or a dict, and wait until the worker has applied it. Raises WorkerDied, AckTimeout, the
        worker's own exception, RuntimeError for an answer that is none."""
        self.send_weights_async(model_id, weights)
        self.wait_ack()

    def send_weights_async(self, model_id: str, weights: Any) -> None:
        """Send, or as long as an earlier send is not answered, wait with that for wait_ack()."""
        delivery = Delivery(self._wait)
        if self.connected:
            self._sent += 1
            payload = self._payload(self._packer.pack(weights, model_id, self._sent))
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
        """Nothing: the call's return is the answer."""

    def check_ack(self, message: str = "updated") -> None:
        """Nothing: wait_ack() waits for the call's return."""
