"""The worker's end of its senders' connections: one message at a time, which is the worker's until it is answered."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ....engine.outcome import Failure
from ....errors import ProtocolError, WriterDied
from ...link.connection import Channel
from ...link.door import Door, DoorKeeper
from ...link.proved import PROOF
from ...link.send_lock import SendLock, TryHold
from ...link.serial_executor import GRACE, Task
from ...pickling import dumps
from ...strategy import WeightStrategy
from ..location import Address, here
from ..packed_weights import Announcement, Label, unpack
from ..relay import RelayOptions, close_here, publish_here
from .group_transfers import receive
from .rank_address import own_host, read_address, store_errors, write_address
from .rank_messages import FAILED, UNTAKEN, UPDATED, RankAnswer, RankMessage, RelayEnd, wrong_with

_SLICE = 0.05  # seconds of a wait
_STORE = 0.5  # seconds between two looks whether the store is still there, while no sender is


@dataclass(eq=False)
class Received:
    """A message that was taken, with its bytes.

    content: a Label, whose bytes are in the buffer; weights; or an Announcement. None: it was not unpickled yet.
    """

    channel: Channel
    message: RankMessage
    content: Any = None


class Inbox:
    """The worker's end. It carries out messages for the node's relay, and returns the worker's own.

    INV: a message that was taken is answered, whatever interrupts: until then next() gives it again.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._keeper = DoorKeeper()
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.lock = SendLock()  # held from taking a message to answering it
        self._waiting: deque[tuple[Channel, RankMessage]] = deque()  # read, and not taken
        self._received: Received | None = None  # and not answered
        self._given: Received | None = None  # what receive_weights() has returned, until acknowledge() answers it
        self._answering = threading.RLock()  # held by acknowledge(), so that what it answers is not given again
        self._asked: Task | None = None  # a look for the next one, that a call has not waited for to its end
        self._looked = 0.0  # when the store was last looked for
        self._closed = False
        self._handing = threading.Lock()  # so that no thread gets the door after the one that is to close it has ended

    def introduce(self, timeout: float = 60.0) -> None:
        """Listen, and write into the store where senders reach this rank.

        Raises ProtocolError when the store does not answer within `timeout` seconds, and closes this end.
        """
        task = self._keeper.give(self._introduce)
        if not task.done_by(time.monotonic() + timeout):
            self.close()
            raise ProtocolError(
                f"the store of torch.distributed did not answer within {timeout:g} s; look after its host, or give "
                "more with timeout="
            )
        task.result()

    def next(self, deadline: float, *, after: Received | None = None) -> Received | None:
        """The next message, with its bytes; None if none came. Raises WriterDied, RuntimeError for what is no message.

        answer() or fail() it: until then it is given again, unless it is `after`.
        """
        if self._received is after:
            self._received = None
        grace = GRACE
        while (received := self._received) is None:
            asked = self._asked
            if asked is None:
                asked = self._asked = self._keeper.give(partial(self._take, deadline))
            else:
                grace = 0.0  # it was late before
            if not asked.done_by(deadline + grace):
                return None  # the next call goes on with it
            self._asked = None
            asked.result()
            if self._received is None and time.monotonic() >= deadline:
                return None
        return received

    def unpack(self, received: Received) -> Any:
        """Weights with their stamp, as views of a buffer that the next message overwrites, or an announcement."""
        if received.content is None:
            received.content = pickle.loads(received.message.body)
        return unpack(received.content, self._buffer) if isinstance(received.content, Label) else received.content

    def answer(self, received: Received, word: str = UPDATED, content: Any = None) -> None:
        """Answer this message."""
        with contextlib.suppress(OSError):  # the sender is gone, so no process waits for the answer
            received.channel.send(dumps(RankAnswer(received.message.number, word, content)))
        if self._received is received:
            self._received = None
        if received.channel.unsent and self._keeper.door is not None:
            self._keeper.door.ring()

    def fail(self, received: Received, error: BaseException) -> None:
        """Answer that it could not be applied; the error raises in the sender. To be called where it is handled."""
        self.answer(received, FAILED, Failure.of(error))

    def receive_weights(
        self, deadline: float, destinations: Iterable[Any], strategy: WeightStrategy
    ) -> tuple[str, Any] | None:
        """The next (model_id, weights), applied to these destinations; None when there are none in time.

        acknowledge() answers. What applying them raises is the answer too, and raises here.
        """
        with TryHold(self.lock, deadline) as hold:
            with self._answering:
                given = self._given
            received = self.next(deadline, after=given) if hold.taken else None
            if received is None:
                return None
            try:
                weights = self.unpack(received)
                if isinstance(weights, Announcement):
                    raise ProtocolError(
                        'these weights were sent with fan_out="node"; receive them with the receiver of a scheme, '
                        "which binds the model to shared memory"
                    )
                for destination in destinations:
                    strategy.apply_weights(destination, weights)
            except BaseException as error:  # the sender waits for an answer
                self.fail(received, error)
                raise
            self._given = received
            return weights.stamp.model_id, weights

    def acknowledge(self, word: str) -> None:
        """Answer what receive_weights() returned last; without one it is a word of the worker's own."""
        with self._answering:
            received, self._given = self._given, None
            if received is not None:
                self.answer(received, word)
                return
        payload, door = dumps(RankAnswer(None, word)), self._keeper.door
        if door is not None:
            door.send(payload)
        else:
            task = self._keeper.give(lambda: self._introduce().send(payload))
            if task.done_by(time.monotonic() + GRACE):  # else the store does not answer, and it is under way
                task.result()

    def close(self) -> None:
        """Receive no more; the senders take this worker for dead. Idempotent."""
        with self._handing:
            self._closed = True
        self._keeper.close()

    # On the keeper's thread.

    def _introduce(self) -> Door:
        if self._keeper.door is None:
            with store_errors(), contextlib.suppress(ProtocolError):  # what lies there is replaced
                read_address(self._store, self._rank)  # a store whose host is stopped keeps this thread here
            if self._closed:  # meanwhile: senders must not be led to an end that no call reads
                raise ProtocolError(f"the end of rank {self._rank} was closed before the store answered")
            host, secret = own_host(self._store), secrets.token_bytes(PROOF)
            door = Door(host, secret)
            try:
                with store_errors():
                    write_address(self._store, self._rank, Address(host, door.port, secret, here()))
                with self._handing:
                    if self._closed:  # the keeper's thread ends now, and another one would never do so
                        raise ProtocolError(f"the end of rank {self._rank} was closed while it wrote its address")
                    self._keeper.put(door)
                    self._keeper.door = door
            except BaseException:
                door.close()
                raise
        return self._keeper.door

    def _take(self, deadline: float) -> None:
        """Take the next message and its bytes, if it comes in time. A sender that stops midway keeps this thread."""
        door = self._introduce()
        while self._received is None and not self._closed:
            rest = max(0.0, deadline - time.monotonic())
            for channel in door.tend(0.0 if self._waiting else min(rest, _SLICE), read=True):
                self._read(door, channel)
            if self._waiting:
                self._receive(*self._waiting.popleft())
            elif not door.senders and time.monotonic() > self._looked + _STORE:
                with store_errors():  # without it no sender can find this rank
                    read_address(self._store, self._rank)
                self._looked = time.monotonic()
            elif time.monotonic() >= deadline:
                return

    def _read(self, door: Door, channel: Channel) -> None:
        """What this sender has sent. What it had sent before its farewell is dropped."""
        wrong = False
        with contextlib.suppress(EOFError, OSError):
            while not wrong and (found := channel.peek()) is not None:
                del channel.arrived[0]
                message = found[0]
                if isinstance(message, RankAnswer) or wrong_with(message):
                    wrong = True
                elif isinstance(message, RankMessage):
                    self._waiting.append((channel, message))
                elif isinstance(message, RelayEnd):
                    close_here(message.session, ended=message.ended)
                else:
                    self._waiting = deque(each for each in self._waiting if each[0] is not channel)
        wrong = wrong or bool(channel.garbage)
        if wrong or channel.ended or channel.closed:
            door.drop(channel)
            self._looked = 0.0
        if wrong:
            raise RuntimeError(
                f"a sender of rank {self._rank} has sent what is no message of this scheme, and was disconnected; run "
                "the same shmsync on all ranks"
            )

    def _receive(self, channel: Channel, message: RankMessage) -> None:
        received = Received(channel, message)
        try:
            if message.kind == "bytes":
                if self._buffer.numel() != message.size:
                    self._buffer = torch.empty(message.size, dtype=torch.uint8, device="cpu")
                receive(self._buffer, message.source, message.number)
        except WriterDied:
            raise
        except Exception as error:  # no memory, no process group: the bytes stay there, and no worker will take them
            self.answer(received, UNTAKEN, Failure.of(error))
            return
        if message.relay is not None:
            try:  # be the relay of this node
                received.content = publish_here(RelayOptions(*message.relay), self.unpack(received))
            except Exception as error:
                self.fail(received, error)
                return
            self.answer(received, UPDATED, received.content)
            return
        self._received = received
