"""The worker's side: one message at a time, which is the worker's until it is answered."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from ....engine.source.strategy import WeightStrategy
from ....errors import ProtocolError, WriterDied
from ...link.send_lock import LockHold, TransportLock
from ...link.serial_executor import GRACE
from ...link.timed_queue import TimedQueue
from ..location import here
from ..packed_weights import Announcement, Label, Stamp, unpack
from ..relay import RelayOptions, close_here, publish_here
from ..weight_client import fetch
from . import store_channel as mailbox
from .liveness import Beacon
from .store_channel import Mailbox, tag_of
from .store_poller import Courier, StoreCall
from .transfers import receive


class Inbox:
    """The worker's end of a mailbox; it carries out messages for the node's relay, and returns the worker's own.

    INV: a message that was taken is answered, whatever interrupts: until then next() gives it again.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._beacon: Beacon | None = None
        self._manifest: tuple[str, bytes] | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._transport_lock = TransportLock(f"the mailbox of rank {mailbox.rank}")
        self._message: dict[str, Any] | None = None  # taken, with its bytes, and not answered
        self._after: str | None = None
        self._looks = 0
        # Its own, not the one that all users of a store share: it also waits for the bytes.
        self._courier = Courier(mailbox.store)
        self._given: str | None = None  # the serial number of what receive_weights() has returned
        self._asked: Receipt | None = None  # for the next one

    def introduce(self, timeout: float = 60.0) -> None:
        """Say where this worker is, so that the sender sees its death, and knows which node it is on.

        Raises ProtocolError when the store does not answer within `timeout` seconds.
        """
        task = self._courier.give(self._introduce)
        if not task.done_by(time.monotonic() + timeout):
            raise ProtocolError(
                f"the store of torch.distributed did not answer within {timeout:g} s; look after its host, or give "
                "more with timeout="
            )
        with _store_errors():
            task.result()

    def _introduce(self) -> None:
        if self._beacon is None:
            beacon = Beacon(self._mailbox.store)
            self._mailbox.introduce(here(), beacon.address)
            self._beacon = beacon

    def lock(self, deadline: float) -> LockHold:
        """Held by one thread from taking a message to answering it.

        `with` it and look at `.taken`: False when another thread had it until the deadline, or this one has it already.
        """
        return self._transport_lock.hold(deadline, refuse=False)

    def next(self, deadline: float, *, after: str | None = None) -> dict[str, Any] | None:
        """The next message, with its bytes; None if none came. Raises WriterDied, RuntimeError for what is no message.

        answer() or fail() it: until then it is given again, unless its serial number is `after`.
        """
        if self._beacon is not None:
            self._beacon.tend()
        self._after = after
        while (message := self._ready()) is None:
            asked = self._asked
            if asked is None:
                asked = self._asked = Receipt(self._courier, self._take)
            if not asked.wait(deadline):
                return None  # the next call goes on with it
            if asked.finished():
                self._asked = None
                asked.result()
            if self._ready() is None and time.monotonic() >= deadline:
                return None
        return message

    def _ready(self) -> dict[str, Any] | None:
        message = self._message
        return None if message is None or message["serial"] == self._after else message

    def _take(self) -> bool:
        """Take the next message and its bytes, if it is there. On the courier: a sender that stops midway keeps it."""
        self._introduce()
        if self._ready() is not None:
            return True
        listen, self._looks = self._looks % 16 == 0, self._looks + 1  # now and then
        message = self._mailbox.take_message(listen=listen)
        if message is None:
            return False
        try:
            if "bytes" in message:
                self._fill(message)
            elif "ticket" in message:
                message["weights"] = _fetched(message["ticket"])
        except (WriterDied, torch.distributed.DistError):
            raise
        except Exception as error:  # no memory, no process group: the bytes stay there, and no worker will take them
            self._mailbox.put_answer(message["serial"], mailbox.FAILED, {**mailbox.failure(error), "untaken": True})
            return False
        if "close" in message:
            close_here(message["close"], ended=message["ended"])
            self._put_answer(message["serial"], mailbox.UPDATED, {})
        elif "relay" in message:
            word, content = self._publish(message)
            if "lone" in message and word == mailbox.UPDATED:  # it goes on to the receiver, who answers
                self._message = {**message, "announcement": content["result"]}
            else:
                self._put_answer(message["serial"], word, content)
        else:
            self._message = message
        return self._ready() is not None

    def _put_answer(self, serial: str | None, word: bytes, content: dict[str, Any]) -> None:
        self._mailbox.hush()  # the message may have been taken before its announcement was there
        self._mailbox.put_answer(serial, word, content)

    def _fill(self, message: dict[str, Any]) -> None:
        """The buffer, and what is known of its layout."""
        size, layout = int(message["bytes"]), message["layout"]
        if self._manifest is None or self._manifest[0] != layout:
            self._manifest = layout, self._mailbox.layout(layout)
        if self._buffer.numel() != size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        receive(self._buffer, int(message["from"]), tag_of(message["serial"]))

    def unpack(self, message: dict[str, Any]) -> Any:
        """Weights with their stamp, as views of a buffer that the next message overwrites, or an announcement."""
        if "announcement" in message:
            return mailbox.from_text(message["announcement"])
        if "weights" in message:
            return message["weights"]
        assert self._manifest is not None
        extra = mailbox.from_text(message["extra"]) if "extra" in message else {}
        return unpack(Label(Stamp(*message["stamp"]), message["kind"], self._manifest[1], extra), self._buffer)

    def _publish(self, message: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        """Be the relay of this node; the answer."""
        try:
            announcement = publish_here(RelayOptions(*message["relay"]), self.unpack(message))
        except Exception as error:
            return mailbox.FAILED, mailbox.failure(error)
        return mailbox.UPDATED, {"result": mailbox.to_text(announcement)}

    def answer(self, serial: str | None, word: bytes = mailbox.UPDATED, content: dict[str, Any] | None = None) -> None:
        """Answer the message of this serial number. Raises WriterDied when the store cannot be reached any more."""
        task = self._courier.give(partial(self._put_answer, serial, word, content or {}))
        if self._message is not None and self._message["serial"] == serial:
            self._message = None
        if task.done_by(time.monotonic() + GRACE):  # else it is under way
            with _store_errors():
                task.result()

    def fail(self, message: dict[str, Any], error: BaseException) -> None:
        """Answer that it could not be applied; the error raises in the sender. To be called where it is handled."""
        with contextlib.suppress(WriterDied):  # the caller has an error to raise
            self.answer(message["serial"], mailbox.FAILED, mailbox.failure(error))

    def receive_weights(
        self, deadline: float, destinations: Iterable[Any], strategy: WeightStrategy
    ) -> tuple[str, Any] | None:
        """The next (model_id, weights), applied to these destinations; None when there are none in time.

        acknowledge() answers. What applying them raises is the answer too, and raises here.
        """
        with self.lock(deadline) as turn:
            message = self.next(deadline, after=self._given) if turn.taken else None
            if message is None:
                return None
            try:
                received = self.unpack(message)
                if isinstance(received, Announcement):
                    raise ProtocolError(
                        'these weights were sent with fan_out="node"; receive them with the receiver of a scheme, '
                        "which binds the model to shared memory"
                    )
                for destination in destinations:
                    strategy.apply_weights(destination, received)
            except BaseException as error:  # the sender waits for an answer
                self.fail(message, error)
                raise
            self._given = message["serial"]
            return Stamp(*message["stamp"]).model_id, received

    def acknowledge(self, word: bytes) -> None:
        """Answer what receive_weights() returned last. Raises WriterDied when the store cannot be reached any more."""
        self.answer(self._given, word)
        self._given = None

    def close(self) -> None:
        """Receive no more; the sender takes this worker for dead. Idempotent."""
        self._courier.close()
        if self._beacon is not None:
            self._beacon.close()


def _fetched(ticket: str) -> Any:
    """The weights. Raises what is no death of the sender: it may have given them up, and lives."""
    try:
        return fetch(mailbox.from_text(ticket))
    except WriterDied as error:
        raise ProtocolError(str(error)) from error


class Receipt(StoreCall):
    """A worker's look for its next message.

    Args:
        take: takes it, if it is there.
    """

    def __init__(self, courier: Courier, take: Callable[[], bool]) -> None:
        super().__init__(courier)
        self._take = take

        self._overdue = False  # the courier has not returned from an earlier wait, as far as is known
        self._bell = TimedQueue()

    def wait(self, deadline: float) -> bool:
        """Wait until there is one, or the deadline has come. False: the courier did not return in time."""
        assert self._bell is not None
        rung = not self._bell.empty()
        while not self._bell.empty():
            with contextlib.suppress(queue.Empty):
                self._bell.get(0.0)
        grace = 0.0 if self._overdue and not rung else GRACE
        self._overdue = True
        try:
            self.courier.attend([self], deadline)
            self._bell.get(deadline + grace - time.monotonic())
        except queue.Empty:
            return False
        except BaseException:  # an interrupt: no call waits any more
            self.courier.attend([self], 0.0)
            raise
        self._overdue = False
        return True

    @override
    def finished(self) -> bool:
        return self._finished

    @override
    def try_once(self) -> bool:
        with _store_errors():
            return self._take()

    @override
    def answer(self) -> None:
        """Nothing: the inbox has the message."""


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except torch.distributed.DistError as error:
        raise WriterDied(f"the store cannot be reached any more: {str(error)[:200]}") from error
