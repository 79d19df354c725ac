"""The sender's end of the connection to a rank: messages, until they are answered.

The store's thread connects, sends and gives up, so no interrupt lands between two steps that belong together, and no
caller waits for the store. Callers read the answers themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from typing_extensions import override

from ....engine.outcome import Failure
from ....errors import ForkedHandle, ProtocolError
from ....memory.process import pid_of, poll
from ...link.connection import Channel
from ...link.proved import Dial, connection_of
from ...link.serial_executor import GRACE, Task
from ...pickling import small
from ..location import Address, here, is_loopback
from ..packed_weights import Announcement, PackedWeights
from ..relay import RelayOptions
from ..remote_requests import Call, Failed, Gone
from .group_transfers import SENDER, need_group
from .rank_address import StoreThread, read_address, thread_of
from .rank_messages import UNTAKEN, UPDATED, Farewell, RankAnswer, RankMessage, RelayEnd, wrong_with

_numbers = itertools.count(1)  # of messages
# By number. A rank may take a message although its sender has given up; it waits for the bytes then, so these stay.
_transfers: dict[int, tuple[Any, PackedWeights]] = {}
_CONNECT = 2.0  # seconds: the kernel's own attempts come ever more rarely
_PAUSE = 0.1  # seconds between two attempts to connect
_WORDS = 1000  # of the worker's own, that are kept until a call takes them
_SOON, _LATER, _SLICE = 0.0005, 0.005, 0.05  # seconds of a wait without and with a connection to look at


class RankCall(Call):
    """What a sender waits for from one rank."""

    answer: RankAnswer | None = None
    trouble: Exception | None = None  # instead of an answer

    def __init__(self, end: RankEnd) -> None:
        self.end = end

    def look(self) -> None:
        """Take in what has come. Never waits."""
        self.end.look()

    @override
    def finished(self) -> bool:
        if self.answer is None and self.trouble is None:
            self.look()
        return self.answer is not None or self.trouble is not None

    @override
    def result(self) -> Any:
        if self.answer is None:
            assert self.trouble is not None
            raise self.trouble
        _, word, content = self.answer
        if isinstance(content, Failure):
            raise Failed(content)
        if word != self.end.expected:
            raise Failed(f"it answered {word!r}")
        return content


class MessageCall(RankCall):
    """A message, until its answer is there."""

    def __init__(self, end: RankEnd, payload: Any, relay: RelayOptions | None) -> None:
        super().__init__(end)
        self.number = next(_numbers) & 0x7FFFFFFF
        self.payload = payload
        self.sent = False
        self._relay = None if relay is None else tuple(relay)

    def send(self, channel: Channel) -> None:
        """On the store's thread: send it, and its bytes."""
        kind, body, size, payload = "bytes", b"", 0, self.payload
        if isinstance(payload, Announcement):
            kind, body = "announcement", pickle.dumps(payload)
        else:
            body, size = pickle.dumps(payload.label), payload.buffer.nbytes
        if size:  # first: a rank that has the message waits for them
            try:
                work = torch.distributed.isend(payload.buffer, self.end.rank, tag=self.number)
            except Exception as error:
                raise Gone(f"torch.distributed: {str(error)[:200]}") from error
            _transfers[self.number] = work, payload
        self.sent = True
        source = torch.distributed.get_rank() if torch.distributed.is_initialized() else SENDER
        channel.send(small(RankMessage(self.number, kind, body, source, size, self._relay)))  # type: ignore[arg-type]

    def accept(self, answer: RankAnswer) -> None:
        """This is the answer to it."""
        self.answer = answer
        if answer.word != UNTAKEN:
            _transfers.pop(self.number, None)
            self.payload = None  # so that the next send may have the buffer


class NewsCall(RankCall):
    """Waits for what the end gets to know without a message. `find` gives it; None: it is not known yet."""

    def __init__(self, end: RankEnd, find: Callable[[], Any]) -> None:
        super().__init__(end)
        self._find = find
        self._fall = end.fall

    @override
    def look(self) -> None:
        super().look()
        if (found := self._find()) is not None:
            self.answer = RankAnswer(None, self.end.expected, found)
        elif self.end.fall is not self._fall:
            self.trouble = self.end.fall


class WordCall(NewsCall):
    """Waits for a word of the worker's own, which should be this one."""

    def __init__(self, end: RankEnd, word: str) -> None:
        super().__init__(end, lambda: end.words[0] if end.words else None)
        self._word = word

    @override
    def result(self) -> None:
        super().result()
        if (word := self.end.words.popleft()) != self._word:
            raise Failed(f"it answered {word!r}")


class RankEnd:
    """Of one transport to one rank."""

    def __init__(self, store: Any, rank: int) -> None:
        self.rank = rank
        self.expected = UPDATED  # the word that the worker should answer with
        self.address: Address | None = None
        self.channel: Channel | None = None
        self.fall: Exception | None = None  # the last reason for which no answer could come
        self.words: deque[str] = deque(maxlen=_WORDS)
        self._store, self._pid = store, os.getpid()
        self._thread: StoreThread | None = thread_of(store)  # None: closed; a step that comes later is dropped
        self._calls: dict[int, MessageCall] = {}
        self._connection: Connection | None = None  # the channel holds it weakly
        self._dial: Dial | None = None
        self._dialled = 0.0
        self._seeking = self._lost = False

    # For callers, on any thread.

    def post(self, payload: Any, relay: RelayOptions | None = None) -> Call:
        """Send packed weights or an announcement. Raises ProtocolError when a process group is needed.

        Args:
            payload: what to send.
            relay: the rank publishes it for its node, and answers where.
        """
        if isinstance(payload, PackedWeights) and payload.buffer.numel():
            need_group()
        return self._begin(MessageCall(self, payload, relay))

    def wait_word(self, word: str) -> Call:
        """The next word of the worker's own, which should be this one."""
        return self._begin(WordCall(self, word))

    def ask_location(self) -> Call:
        """Where does the rank run? Its address in the store has that."""
        # The address is read once: another thread may set it.
        return self._begin(NewsCall(self, lambda: None if (address := self.address) is None else address.location))

    def _begin(self, call: RankCall) -> Call:
        if os.getpid() != self._pid:
            raise ForkedHandle(
                f"the connection to rank {self.rank} belongs to process {self._pid}, from which this one was forked; "
                "make a scheme or transport here"
            )
        self._hand(Task(partial(self._take_on, call)))
        return call

    def _hand(self, item: Any) -> None:
        """Let the store's thread do this, unless this end was closed."""
        thread = self._thread
        if thread is not None:
            thread.put(item)

    def close_relay(self, session: str, *, ended: bool) -> None:
        """Let the rank end what it relays for a sender, when it receives next. `ended`: the sender sends no more."""
        task = Task(partial(self._say, RelayEnd(session, ended)))
        self._hand(task)
        if ended:  # the process may end next
            task.done_by(time.monotonic() + GRACE)

    @property
    def busy(self) -> bool:
        """Is a message not answered yet? Perhaps one that an interrupt has lost."""
        self.look()
        return bool(self._calls)

    def look(self) -> None:
        """Take in what has come. Never waits.

        An interrupt may come at any call: then the same answer is read again, so each step can be done twice.
        """
        channel = self.channel
        if channel is None:
            return
        with channel.lock:
            try:
                channel.flush()
                while (found := channel.peek()) is not None:
                    answer = found[0]
                    if type(answer) is not RankAnswer or wrong_with(answer):
                        raise EOFError("what the process there sent is no answer of this scheme")
                    call = self._calls.get(answer.number or 0)
                    if call is not None:
                        call.accept(answer)
                        self._calls.pop(call.number, None)
                    if answer.number is None:  # no call from here on: see Channel.peek()
                        self.words += (answer.word,)
                    del channel.arrived[0]
            except (EOFError, OSError):  # it has ended, or a fork has closed it
                self._hand(Task(partial(self._lose, channel)))
        if channel.ended or channel.garbage:
            self._hand(Task(partial(self._lose, channel)))

    def close(self) -> None:
        """End the connection. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid:  # a forked child has no such thread
            thread.give(self._end)

    # On the store's thread.

    def _take_on(self, call: RankCall) -> None:
        if isinstance(call, MessageCall):
            self._calls[call.number] = call
        self.look()
        if self.channel is not None and self.channel.ended:
            self._lose(self.channel)  # before a message is lost to it
        elif self.channel is not None:
            self._send_all()
        elif not self._seeking:
            self._seeking = True
            self._hand(weakref.ref(self))

    def _send_all(self) -> None:
        assert self.channel is not None
        for call in [each for each in self._calls.values() if not each.sent]:
            try:
                call.send(self.channel)
            except Exception as error:  # no process group; what cannot be pickled; a channel that a fork has closed
                self._drop([call], error)

    def _say(self, message: Any) -> None:
        if self.channel is not None:
            self.channel.send(small(message))

    def seek(self) -> bool:
        """Look for the rank once. Has the search ended?"""
        ended = True
        try:
            ended = self._thread is None or self._connected()
        except torch.distributed.DistError as error:
            trouble = ProtocolError(
                f"the store of torch.distributed cannot be reached: {str(error)[:200]}; make a new process "
                "group and a new scheme"
            )
            trouble.__cause__ = error
            self._give_up_all(self._gone() if self._lost else trouble)
        except Exception as error:
            self._give_up_all(error)
        self._seeking = not ended
        return ended

    def _connected(self) -> bool:
        """Is there a connection now, or the certainty that there will be none?"""
        now = time.monotonic()
        try:
            if self._dial is None:
                if now < self._dialled + _PAUSE:
                    return False
                address = read_address(self._store, self.rank)
                if address is None:
                    return False
                if address.location.boot_id != here().boot_id and is_loopback(address.host):
                    raise ProtocolError(
                        f"rank {self.rank} listens at {address.host} on node {address.location.node}, which no other "
                        "machine reaches; start the store with an address of its host that all ranks reach"
                    )
                self.address, self._dialled = address, now
                self._dial = Dial(address.host, address.port, address.secret)
            proved = self._dial.advance()
        except ConnectionRefusedError:  # no process listens there any more
            self._dial = None
            self._give_up_all(self._gone())
            return True
        except OSError:  # nothing is known: it may come back
            self._dial = proved = None
        if proved is None:
            if now < self._dialled + _CONNECT or (self._dial is not None and self._dial.connected):
                return False
            if self._dial is not None:
                self._dial.close()
                self._dial = None
            if self._lost:  # the kernel had got no sign of it for half a minute before
                self._give_up_all(self._gone())
            return self._lost
        self._dial = None
        self._connection = connection_of(proved)
        self.channel = Channel.of(self._connection)
        if self._lost:  # it has another address now, or has closed the connection: what it had not answered is lost
            self._lost = False
            self._drop([call for call in self._calls.values() if call.sent], self._gone(final=False))
        self._send_all()
        return True

    def _lose(self, channel: Channel) -> None:
        """The connection has ended: is its process dead, or does it listen under another address?"""
        if self.channel is channel:
            self._hang_up()
            self._lost, self._dialled, self._seeking = True, 0.0, True
            self._hand(weakref.ref(self))

    def _gone(self, *, final: bool = True) -> Gone:
        assert self.address is not None
        location = self.address.location
        return Gone(f"rank {self.rank}, pid {pid_of(location.owner)} on node {location.node}", final=final)

    def _give_up_all(self, trouble: Exception) -> None:
        self.address, self._lost, self._dialled = None, False, 0.0
        self._drop(list(self._calls.values()), trouble)
        self.fall = trouble

    def _drop(self, calls: Collection[MessageCall], trouble: Exception) -> None:
        for call in calls:
            call.trouble = trouble
            self._calls.pop(call.number, None)
            _transfers.pop(call.number, None)

    def _end(self) -> None:
        if self._dial is not None:
            self._dial.close()
        for call in self._calls.values():  # its transfer stays: the rank may be waiting for the bytes
            call.trouble = Gone("its transport was closed", final=False)
        self._calls.clear()
        with contextlib.suppress(OSError):
            self._say(Farewell())
        self._hang_up()

    def _hang_up(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None and self._connection is not None:
            with channel.lock:  # no other thread is reading: the descriptor's number is used again
                self._connection.close()
            self._connection = None


def wait_for(calls: Collection[Call], seconds: float) -> None:
    """Return when one of these calls is finished, or after `seconds`."""
    end, pause = time.monotonic() + seconds, _SOON
    while not any(call.finished() for call in calls) and (rest := end - time.monotonic()) > 0:
        poller, pause = select.poll(), min(2 * pause, _LATER)
        for call in calls:
            channel = call.end.channel if isinstance(call, RankCall) else None
            if channel is None or channel.ended or channel.closed:
                rest = min(rest, pause)
            else:
                poller.register(channel.fd, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
        poll(poller, min(rest, _SLICE) * 1000)
