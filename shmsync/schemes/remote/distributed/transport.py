"""The transport over torch.distributed: announced and answered through a store, moved by the process group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from functools import partial
from typing import Any

import torch

from ....engine.strategy import WeightStrategy
from ....engine.timing import check_timeout
from ....errors import ProtocolError
from ....memory.manifest import fingerprint
from ..background import Clerk, Job
from ..parcel import Announcement, Stamp, unpack
from ..relay import RelayOptions
from ..requests import Answered, Call, sleeping
from ..transport import RemoteTransport
from . import mailbox
from .lifeline import Lifeline
from .mailbox import Mailbox
from .requests import MailCall
from .transfers import SENDER, isend, my_rank, receive, wait
from .worker import Inbox

_STRATEGY = WeightStrategy()


class DistributedTransport(RemoteTransport):
    """Reaches one rank, or in that rank's process the sender, whichever it is used as first.

    Args:
        weights_buffer: a TensorDict that receive_weights() fills; None: it gives views of a buffer of its own.
        store: a store that both processes use. None: every call does nothing.
        rank: the worker's. None: every call does nothing.
        sync: kept for code that has it; both kinds of transfer end by the deadline.
        timeout: seconds that a send waits, and that a transfer may take; math.inf waits for ever.

    The default process group of torch.distributed (gloo) moves the tensors.
    """

    def __init__(
        self,
        *,
        weights_buffer: Any = None,
        store: Any = None,
        rank: int | None = None,
        sync: bool = True,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(timeout)
        self.weights_buffer = weights_buffer
        self.store = store
        self.rank = rank
        self.sync = sync
        self.mailbox = None if store is None or rank is None else Mailbox(store, rank)
        # The sender's side.
        self._layout: str | None = None  # the manifest that the store has
        self._lifeline: Lifeline | None = None
        # The worker's side.
        self.inbox = None if self.mailbox is None else Inbox(self.mailbox)
        self._given: str | None = None  # the serial number of what receive_weights() has returned
        self._initial_clerk = Clerk()
        self._initial: Job | None = None

    # The sender's side.

    def post(self, payload: Any, relay: RelayOptions | None = None) -> Call:
        """Send a parcel or an announcement. `relay`: the rank publishes it for its node, and answers where."""
        if self.mailbox is None:
            return Answered()
        stamp: Stamp = payload.stamp if isinstance(payload, Announcement) else payload.label.stamp
        message: dict[str, Any] = {"stamp": stamp, "from": my_rank()}
        if isinstance(payload, Announcement):
            message["announcement"] = mailbox.to_text(payload)
            return MailCall(self.mailbox, self.watch, message, payload, None)
        label = payload.label
        layout = f"{fingerprint(label.manifest):016x}"
        if layout != self._layout:
            self.mailbox.put_layout(layout, label.manifest)
            self._layout = layout
        message.update(bytes=payload.buffer.nbytes, layout=layout, kind=label.kind)
        if label.extra:
            message["extra"] = mailbox.to_text(label.extra)
        if relay is not None:
            message["relay"] = list(relay)
        return MailCall(self.mailbox, self.watch, message, payload, payload.buffer)

    def close_relay(self, session: str, *, ended: bool) -> None:
        """Let the rank end what it relays for a sender, when it receives next. `ended`: the sender sends no more."""
        if self.mailbox is not None and not self.busy and not self.reported:
            with contextlib.suppress(torch.distributed.DistError):
                self.mailbox.put_message({"serial": mailbox.new_serial(), "close": session, "ended": ended})

    def watch(self) -> Lifeline | None:
        """What tells of the worker's death, once the worker has said where it is."""
        assert self.mailbox is not None
        if self._lifeline is None and (introduced := self.mailbox.introduced()) is not None:
            self.place = introduced[0]
            self._lifeline = Lifeline(*introduced)
        return self._lifeline

    @property
    def connected(self) -> bool:
        """As in RemoteTransport."""
        return self.mailbox is not None

    def _wait(self, calls: Collection[Call], seconds: float) -> None:
        sleeping(calls, seconds)

    def send_initial_weights(self, weights: Any) -> None:
        """Send without the store, for a worker that is in receive_initial_weights()."""
        if self.rank is not None:
            parcel = self._packer.pack(weights, "policy", 0)
            label = torch.frombuffer(bytearray(mailbox.to_text(parcel.label).encode()), dtype=torch.uint8)
            sizes = torch.tensor([label.numel(), parcel.buffer.nbytes])
            works = [isend(part, self.rank, 0) for part in (sizes, label, parcel.buffer) if part.numel()]
            # The job keeps the buffers: the transfer goes on when this call has given up.
            self._finish(self._initial_clerk.give(partial(wait, works, sizes, label, parcel)), "the worker")

    # The worker's side.

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> tuple[str, Any] | None:
        """The next weights as (model_id, weights); None when there are none within `timeout` seconds.

        Args:
            timeout: None is the transport's own.
            weights: a TensorDict or a dict to copy into; None: the constructor's. Without either the result shows a
                buffer that the next message overwrites.
            model: a module, TensorDict or dict to apply them to.
            strategy: how; None: in whatever form they come.

        send_ack() answers. Raises ManifestMismatch for weights that fit neither, WriterDied when the sender is gone.
        """
        if self.inbox is None:
            return None
        deadline = time.monotonic() + check_timeout(self.timeout if timeout is None else timeout)
        with self.inbox.alone(deadline) as alone:
            message = self.inbox.next(deadline, after=self._given) if alone else None
            if message is None:
                return None
            target = self.weights_buffer if weights is None else weights
            try:
                received = self.inbox.unpack(message)
                if isinstance(received, Announcement):
                    raise ProtocolError(
                        'these weights were sent with fan_out="node"; receive them with the receiver of a scheme, '
                        "which binds the model to shared memory"
                    )
                for destination in (target, model):
                    if destination is not None:
                        (strategy or _STRATEGY).apply_weights(destination, received)
            except BaseException as error:  # the sender waits for an answer
                self.inbox.fail(message, error)
                raise
            self._given = message["serial"]
            return Stamp(*message["stamp"]).model_id, received if target is None else target

    def send_ack(self, message: str = "updated") -> None:
        """Answer the weights that receive_weights() returned last. Raises WriterDied when the store cannot be reached
        any more."""
        if self.inbox is not None:
            self.inbox.answer(self._given, message.encode())
            self._given = None

    def receive_initial_weights(self) -> Any:
        """Weights that rank 0 sends with send_initial_weights(); None when the transport has no rank. Waits as long as
        its timeout."""
        if self.rank is None:
            return None

        def get() -> Any:
            sizes = receive(torch.zeros(2, dtype=torch.int64), SENDER, 0)
            label = receive(torch.empty(int(sizes[0]), dtype=torch.uint8), SENDER, 0)
            buffer = receive(torch.empty(int(sizes[1]), dtype=torch.uint8), SENDER, 0)
            return unpack(mailbox.from_text(bytes(label.numpy()).decode()), buffer)

        job = self._initial = self._initial or self._initial_clerk.give(get)
        try:
            weights = self._finish(job, "the sender")
        finally:
            if job.done:  # else the next call goes on with it
                self._initial = None
        if self.weights_buffer is None:
            return weights
        _STRATEGY.apply_weights(self.weights_buffer, weights)
        return self.weights_buffer

    # Either side.

    def _finish(self, job: Job, who: str) -> Any:
        """Wait for something that has no time-out, no longer than this transport's."""
        if not job.done_by(time.monotonic() + self.timeout):
            raise TimeoutError(
                f"{who} did not take part in the transfer within {self.timeout:g} s; call again to go on waiting, or "
                "give more with timeout="
            )
        return job.result()

    def check_ack(self, message: str = "updated") -> None:
        """Wait for the answer to the last send_weights_async(), which should be `message`."""
        self.wait_ack()

    def check_connection(self) -> bool:
        """Is there a process group in this process?"""
        return torch.distributed.is_initialized()

    def setup_connection_and_weights_on_sender(self) -> None:
        """Nothing: init_process_group() has made the connection."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int, weights: Any = None, model: Any = None, strategy: WeightStrategy | None = None
    ) -> None:
        """Nothing: init_process_group() has made the connection."""

    def close(self) -> None:
        """Watch the other side no more. Idempotent."""
        if self.inbox is not None:
            self.inbox.close()
        self._initial_clerk.close()
        if self._lifeline is not None:
            self._lifeline.close()
