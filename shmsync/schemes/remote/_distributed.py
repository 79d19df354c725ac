"""The transport over torch.distributed: announced and answered through a store, moved by the process group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from ..._arguments import check_timeout
from ...errors import ProtocolError, WriterDied
from ...manifest import fingerprint
from ...strategy import WeightStrategy
from .._wire import Failure
from . import _mailbox
from ._calls import Answered, Call, sleeping
from ._clerk import Clerk, Job
from ._lifeline import Lifeline, Listener
from ._mail_calls import MailCall
from ._mailbox import Mailbox
from ._parcel import Announcement, Label, Stamp, unpack
from ._place import here
from ._relay import RelayOptions, close_here, publish_here
from ._transfers import SENDER, isend, my_rank, receive, tag_of
from ._transport import RemoteTransport

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
        self._listener: Listener | None = None
        self._manifest: tuple[str, bytes] | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._answering: dict[str, Any] | None = None  # the message that the next send_ack() answers
        self._clerk = Clerk()
        self._asked: Job | None = None  # for the next message

    # The sender's side.

    def post(self, payload: Any, relay: RelayOptions | None = None) -> Call:
        """Send a parcel or an announcement. `relay`: the rank publishes it for its node, and answers where."""
        if self.mailbox is None:
            return Answered()
        stamp: Stamp = payload.stamp if isinstance(payload, Announcement) else payload.label.stamp
        message: dict[str, Any] = {"stamp": stamp, "from": my_rank()}
        if isinstance(payload, Announcement):
            message["announcement"] = _mailbox.to_text(payload)
            return MailCall(self.mailbox, self.watch, message, payload, None)
        label = payload.label
        layout = f"{fingerprint(label.manifest):016x}"
        if layout != self._layout:
            self.mailbox.put_layout(layout, label.manifest)
            self._layout = layout
        message.update(bytes=payload.buffer.nbytes, layout=layout, kind=label.kind)
        if label.extra:
            message["extra"] = _mailbox.to_text(label.extra)
        if relay is not None:
            message["relay"] = list(relay)
        return MailCall(self.mailbox, self.watch, message, payload, payload.buffer)

    def close_relay(self, session: str) -> None:
        """Let the rank end what it relays, when it receives next."""
        if self.mailbox is not None and not self.busy and not self.reported:
            with contextlib.suppress(torch.distributed.DistError):
                self.mailbox.put_message({"serial": _mailbox.new_serial(), "close": session})

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
            label = torch.frombuffer(bytearray(_mailbox.to_text(parcel.label).encode()), dtype=torch.uint8)
            sizes = torch.tensor([label.numel(), parcel.buffer.nbytes])
            works = [isend(part, self.rank, 0) for part in (sizes, label, parcel.buffer) if part.numel()]
            # It keeps the parcel: the transfer goes on when this call has given up.
            self._finish(lambda: (parcel, label, [work.wait() for work in works]), "the worker")

    # The worker's side.

    def introduce(self) -> None:
        """Say where this worker is, so that the sender sees its death, and knows which node it is on."""
        if self.mailbox is not None and self._listener is None:
            self._listener = Listener(self.store)
            self.mailbox.introduce(here(), self._listener.address)

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
        if self.mailbox is None:
            return None
        deadline = time.monotonic() + check_timeout(self.timeout if timeout is None else timeout)
        message = self._next_message(deadline)
        if message is None:
            return None
        target = self.weights_buffer if weights is None else weights
        try:
            received = self._unpack(message)
            if isinstance(received, Announcement):
                raise ProtocolError(
                    'these weights were sent with fan_out="node"; receive them with the receiver of a scheme, which '
                    "binds the model to shared memory"
                )
            for destination in (target, model):
                if destination is not None:
                    (strategy or _STRATEGY).apply_weights(destination, received)
        except BaseException as error:  # the sender waits for an answer
            self.fail(error)
            raise
        return Stamp(*message["stamp"]).model_id, received if target is None else target

    def receive(self, deadline: float) -> Any:
        """For the scheme: stamped weights or an announcement; None if none came. send_ack() or fail() answers."""
        message = self._next_message(deadline)
        return None if message is None else self._unpack(message)

    def _next_message(self, deadline: float) -> dict[str, Any] | None:
        """The next one whose bytes are there too."""
        self.introduce()
        if self._asked is None:
            self._asked = self._clerk.give(partial(self._next, deadline))
        if not self._asked.done_by(deadline):
            return None  # the next call goes on with it
        asked, self._asked = self._asked, None
        try:
            message: dict[str, Any] | None = asked.result()
        except torch.distributed.DistError as error:
            raise WriterDied(f"the store cannot be reached any more: {str(error)[:200]}") from error
        return message

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """On the clerk's thread, which a sender that is stopped in the middle keeps."""
        assert self.mailbox is not None
        while self.mailbox.arrives("in", deadline):
            message = self.mailbox.take_message()
            if message is None:
                continue
            self._answering = message
            if "bytes" in message:
                self._fill(message)
            if "close" in message:
                close_here(message["close"])
                self._answer(_mailbox.UPDATED, {})
            elif "relay" in message:
                self._publish(message)
            else:
                return message
        return None

    def _fill(self, message: dict[str, Any]) -> None:
        """The buffer, and what is known of its layout."""
        assert self.mailbox is not None
        size, layout = int(message["bytes"]), message["layout"]
        if self._manifest is None or self._manifest[0] != layout:
            self._manifest = layout, self.mailbox.layout(layout)
        if self._buffer.numel() != size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        receive(self._buffer, int(message["from"]), tag_of(message["serial"]))

    def _unpack(self, message: dict[str, Any]) -> Any:
        if "announcement" in message:
            return _mailbox.from_text(message["announcement"])
        assert self._manifest is not None
        extra = _mailbox.from_text(message["extra"]) if "extra" in message else {}
        return unpack(Label(Stamp(*message["stamp"]), message["kind"], self._manifest[1], extra), self._buffer)

    def _publish(self, message: dict[str, Any]) -> None:
        """Be the relay of this node."""
        try:
            announcement = publish_here(RelayOptions(*message["relay"]), self._unpack(message))
        except Exception as error:
            self._answer(_mailbox.FAILED, {"failure": _mailbox.to_text(Failure.of(error, None))})
        else:
            self._answer(_mailbox.UPDATED, {"result": _mailbox.to_text(announcement)})

    def send_ack(self, message: str = "updated") -> None:
        """Answer the weights that came last."""
        if self.mailbox is not None:
            self._give_answer(message.encode(), {})

    def fail(self, error: BaseException) -> None:
        """Answer that they could not be applied; the error raises in the sender. To be called where it is handled.
        Nothing when they were answered before."""
        if self._answering is None:
            return
        self._give_answer(_mailbox.FAILED, {"failure": _mailbox.to_text(Failure.of(error, None))})

    def _give_answer(self, word: bytes, content: dict[str, Any]) -> None:
        job = self._clerk.give(partial(self._answer, word, content))
        if job.done_by(time.monotonic()):  # else it is under way
            job.result()

    def _answer(self, word: bytes, content: dict[str, Any]) -> None:
        answered, self._answering = self._answering, None
        assert self.mailbox is not None
        self.mailbox.put_answer(answered["serial"] if answered else None, word, content)

    def receive_initial_weights(self) -> Any:
        """Weights that rank 0 sends with send_initial_weights(); None when the transport has no rank. Waits as long as
        its timeout."""
        if self.rank is None:
            return None

        def get() -> Any:
            sizes = receive(torch.zeros(2, dtype=torch.int64), SENDER, 0)
            label = receive(torch.empty(int(sizes[0]), dtype=torch.uint8), SENDER, 0)
            buffer = receive(torch.empty(int(sizes[1]), dtype=torch.uint8), SENDER, 0)
            return unpack(_mailbox.from_text(bytes(label.numpy()).decode()), buffer)

        weights = self._finish(get, "the sender")
        if self.weights_buffer is None:
            return weights
        _STRATEGY.apply_weights(self.weights_buffer, weights)
        return self.weights_buffer

    # Either side.

    def _finish(self, job: Callable[[], Any], who: str) -> Any:
        """Do something that has no time-out, no longer than this transport's."""
        given = self._clerk.give(job)
        if not given.done_by(time.monotonic() + self.timeout):
            raise TimeoutError(
                f"{who} did not take part in the transfer within {self.timeout:g} s; give more with timeout="
            )
        return given.result()

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
        if self.mailbox is not None:
            self.mailbox.closed = True
        self._clerk.close()
        for held in (self._lifeline, self._listener):
            if held is not None:
                held.close()
