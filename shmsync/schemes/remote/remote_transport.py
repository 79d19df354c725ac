"""The transport to one worker on another machine, with a sender and without."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from ...engine.deadlines import deadline_after, timeout_or_default, timeout_or_none
from ..link.send_lock import SendLock, hold_all
from .packed_weights import Packer
from .remote_carrier import Carrier
from .remote_requests import Answered, Call, Destination, RemoteSend, Step

_NONE: Any = object()
DEFAULT_TIMEOUT = 60.0  # seconds


def checked_word(message: Any) -> str:
    """A worker's answer, as a string. Raises TypeError for anything else."""
    if not isinstance(message, str):
        raise TypeError(f'a message is a word such as "updated", not {message!r}')
    return message


class RemoteTransport(Destination, ABC):
    """Reaches one worker.

    Args:
        carrier: for sends without a sender.
        timeout: seconds that send_weights() and wait_ack() wait; math.inf waits without limit, None is 60.
    """

    def __init__(self, carrier: Carrier, timeout: float | None) -> None:
        self.timeout = timeout_or_default(timeout, DEFAULT_TIMEOUT)
        self._send_locks = [SendLock()]
        self._carrier = carrier
        self._packer = Packer()
        self._sent = 0
        self._pending: tuple[RemoteSend, str] | None = None
        self.key: Any = None  # by which its sender's Roster knows the worker

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Is there a worker to send to? Otherwise every call does nothing."""

    @abstractmethod
    def start_call(self, payload: Any) -> Call:
        """Send the carrier's payload, or an Announcement. The answer means that the worker has applied it."""

    def post(self, payload: Any) -> Call:
        """Send it if there is a worker to send to."""
        return self.start_call(payload) if self.connected else Answered()

    def send_weights(self, model_id: Any = _NONE, weights: Any = _NONE, *, timeout: float | None = None) -> None:
        """Send a TensorDict or a dict, and wait until the worker has applied it.

        Args:
            model_id: of the weights. Weights alone, in its place, are those of "policy".
            weights: the weights.
            timeout: seconds for the whole call; None is the transport's.

        Raises WorkerDied, AckTimeout, the worker's own exception, RuntimeError for an answer that is none; WriterBusy
        when another thread's send lasted until the deadline, or this one is in the middle of one.
        """
        deadline = deadline_after(timeout, self.timeout)
        with hold_all(self._send_locks, deadline, "send_weights"):
            sending, model_id = self._begin(model_id, weights, deadline)
            self._end(sending, model_id, deadline)

    def send_weights_async(self, model_id: Any = _NONE, weights: Any = _NONE) -> None:
        """Send, or as long as an earlier send is not answered, wait with that for wait_ack()."""
        deadline = deadline_after(None, self.timeout)
        with hold_all(self._send_locks, deadline, "send_weights_async"):
            self._pending = self._begin(model_id, weights, deadline)

    def wait_ack(self, *, timeout: float | None = None) -> None:
        """Wait for the last send_weights_async(). Raises RuntimeError when there was none, and as send_weights().

        Args:
            timeout: seconds; None is the transport's.
        """
        deadline = deadline_after(timeout, self.timeout)
        with hold_all(self._send_locks, deadline, "wait_ack"):
            if self._pending is None:
                raise RuntimeError("no send is pending; call send_weights_async() first")
            (sending, model_id), self._pending = self._pending, None
            self._end(sending, model_id, deadline)

    def _begin(self, model_id: Any, weights: Any, deadline: float) -> tuple[RemoteSend, str]:
        if model_id is _NONE or weights is _NONE:
            model_id, weights = "policy", weights if model_id is _NONE else model_id
        if not isinstance(model_id, str) or isinstance(weights, str) or weights is _NONE:
            raise TypeError(
                f"send_weights() takes a model id and weights, or weights alone, not a {type(model_id).__name__} and a "
                f"{type(weights).__name__}; nothing was sent"
            )
        sending = RemoteSend(self._carrier.wait)
        if self.connected:
            self._sent += 1
            payload = self._carrier.payload(self._packer.pack(weights, model_id, self._sent), deadline)
            sending.add(Step(0, self, partial(self.post, payload)))
        return sending, model_id

    def _end(self, sending: RemoteSend, model_id: str, deadline: float) -> None:
        sending.finish(deadline)
        sending.check(f"the weights of {model_id!r}", None, {0: self})

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """None: the worker gets weights as an argument of a call."""
        timeout_or_none(timeout)
        return None

    def send_ack(self, message: str = "updated") -> None:
        """Does nothing: the call's return is the answer."""

    def check_ack(self, message: str = "updated", *, timeout: float | None = None) -> None:
        """Does nothing for "updated": the call's return is that answer, and wait_ack() waits for it.

        Raises RuntimeError for another word, which no worker of this transport can have answered.
        """
        timeout_or_none(timeout)
        if checked_word(message) != "updated":
            raise RuntimeError(f"this transport's workers answer 'updated' by returning, and never {message!r}")

    def check_connection(self) -> bool:
        """Can this process send?"""
        return True

    def close(self) -> None:
        """Give back what the transport holds. Idempotent."""
        self._carrier.close()
