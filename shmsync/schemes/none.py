"""No synchronisation: the workers keep the weights they came with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from ..engine.deadlines import timeout_or_none
from .api import WeightSyncScheme
from .context import Arguments
from .receiver import WeightReceiver
from .sender import Posted, WeightSender


class NoWeightSyncScheme(WeightSyncScheme):
    """Every call does nothing, and answers as if there were no news."""

    _for_torchrl = (
        "Leave weight_sync_schemes= out and do not call update_policy_weights_(): the collector's workers then keep "
        "the weights they start with"
    )

    def create_transport(self, pipe_or_context: Any = None) -> NoTransport:
        """A transport to nowhere."""
        return NoTransport()

    @override
    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Does nothing: the workers have their weights."""

    @override
    def create_sender(self) -> WeightSender:
        return NoSender(self)

    @override
    def create_receiver(self) -> WeightReceiver:
        return NoReceiver(self)


class NoTransport:
    """Sends nothing, receives nothing, and is always connected."""

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Does nothing: the workers keep the weights they came with."""

    send_weights_async = send_weights

    def wait_ack(self, message: str = "updated") -> None:
        """Does nothing: there is nobody to answer."""

    send_ack = check_ack = wait_ack

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """None, without waiting: there is no sender."""
        timeout_or_none(timeout)
        return None

    def check_connection(self) -> bool:
        """True: there is no connection that could fail."""
        return True


class NoSender(WeightSender):
    """Leaves the workers' weights, and so its version, as they are."""

    @override
    def _source(self, weights: Any) -> Any:
        return weights

    @override
    def _post(self, source: Any, workers: list[int], deadline: float) -> Posted:
        return Posted(0, {})

    def resend(self, worker_ids: Any = None, *, timeout: float | None = None) -> int:
        """0: nothing was sent."""
        return 0

    def pending(self, worker_idx: int) -> list[Any]:
        """None: no worker is read."""
        return []

    @override
    def _chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        return []


class NoReceiver(WeightReceiver):
    """Never has news; needs neither a pipe nor a model."""

    @override
    def _connect(self, arguments: Arguments) -> None:
        self._register_worker_transport(None)

    @override
    def _wait_for_first(self, seconds: float) -> None:
        pass

    @override
    def apply_weights(self, weights: Any) -> None:
        """Does nothing: the model keeps the weights it came with."""
