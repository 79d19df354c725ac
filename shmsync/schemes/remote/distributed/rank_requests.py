"""The sender's side: messages for a rank, until they are answered."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from ....errors import ProtocolError
from ....memory.manifest import fingerprint
from ...link.serial_executor import GRACE
from ..delivery import Delivery
from ..fetch_ticket import FetchTicket, Unreached
from ..location import Place, Site, here
from ..packed_weights import Announcement, Stamp
from ..relay import RelayOptions
from ..remote_requests import Call, Failed, Gone
from . import store_channel as mailbox
from .liveness import Lifeline
from .store_channel import UPDATED, Answer, Mailbox, new_serial, tag_of
from .store_poller import Courier, StoreCall, courier_of
from .transfers import my_rank, need_group

# By serial number. A rank may take a message although its sender has given up. It waits for the bytes then, so they and
# their transfer stay.
_unanswered: dict[str, MailCall] = {}
# By serial number. A look at a rank's answers finds those to the messages of all senders of this process.
_waiting: weakref.WeakValueDictionary[str, MailCall] = weakref.WeakValueDictionary()
_LISTEN = 16  # so many looks at the bell for one at the answers themselves


class MailCall(StoreCall):
    """A message for one rank, until its answer is there.

    Args:
        watch: gives what tells of the worker's death, once that is known.
        expected: gives the word that the worker should answer with.
        before: is done in the store before the message is put there.
        ticket: by which the rank may read the buffer where it lies, if it shares memory with this process.
    """

    def __init__(
        self,
        courier: Courier,
        mailbox: Mailbox,
        watch: Callable[[], Lifeline | None],
        message: dict[str, Any],
        payload: Any,
        buffer: torch.Tensor | None,
        *,
        expected: Callable[[], bytes] = lambda: UPDATED,
        before: Callable[[], None] = lambda: None,
        ticket: FetchTicket | None = None,
    ) -> None:
        super().__init__(courier)
        self.payload = payload
        self._mailbox = mailbox
        self._watch = watch
        self._serial = message["serial"] = new_serial()
        self._message = message
        self._buffer = buffer
        self._expected = expected
        self._before = before
        self._ticket = ticket
        self._posted = False
        self._announced = False
        self._looks = 0
        self._answer: Answer | None = None
        self._gone: str | None = None

    @override
    def try_once(self) -> bool:
        if self._answer is not None:  # another call has found it
            return True
        # Its death first: what it wrote, it wrote before.
        lifeline = self._watch()
        dead = lifeline is not None and lifeline.dead
        if not self._posted:
            if dead:
                raise Gone(f"rank {self._mailbox.rank}, {lifeline}")
            self._post()
        elif not self._announced:
            self._announced = self._mailbox.announce()
        self._take_answer(listen=dead)
        if self._answer is None and dead:
            self._gone = f"rank {self._mailbox.rank}, {lifeline}"
            _unanswered.pop(self._serial, None)
        return self._answer is not None or self._gone is not None

    def _post(self) -> None:
        self._before()
        lifeline = self._watch()
        if self._ticket is not None and lifeline is not None and lifeline.site == Site.of(here()):
            self._message["ticket"] = mailbox.to_text(self._ticket)
            del self._message["bytes"]
        elif self._buffer is not None and self._buffer.numel():
            _unanswered[self._serial] = self
            try:  # before the announcement: without it no worker takes the bytes, while it would wait for them
                self._work = torch.distributed.isend(self._buffer, self._mailbox.rank, tag=tag_of(self._serial))
            except Exception as error:
                del _unanswered[self._serial]
                raise Gone(f"torch.distributed: {str(error)[:200]}") from error
        _waiting[self._serial] = self
        self._announced = _put(self._mailbox, self._message)
        self._posted = True

    def _take_answer(self, *, listen: bool) -> None:
        """Take the answer if it is there, and with it those to earlier messages, which no call waits for any more."""
        self._looks += 1
        bell, answers, last = self._mailbox.said(listen=listen or self._looks % _LISTEN == 0)
        if last is None:
            if bell is not None:
                self._mailbox.silence()  # of a loop of the user's own, which writes the word alone
                self._answer = Answer(self._serial, bell, {})
            return
        answered = [each for each in answers if each.serial is not None]
        for each in answered:
            serial = str(each.serial)
            if not each.content.get("untaken"):
                _unanswered.pop(serial, None)  # perhaps of a call that was given up
            call = _waiting.pop(serial, None)
            if call is not None:
                call.accept(each)
        self._mailbox.forget(answered)
        if answered and bell is None:
            bell = self._mailbox.peek("out")  # it rings after the answer is there
        if bell in (UPDATED, mailbox.FAILED, *(each.word for each in answered)):
            self._mailbox.silence()  # other words have other readers: they stay

    def accept(self, answer: Answer) -> None:
        """This is the answer to it."""
        if not answer.content.get("untaken"):
            self.payload = self._buffer = None  # so that the next send may have the buffer
        self._answer = answer

    @override
    def answer(self) -> Any:
        if self._answer is None:
            raise Gone(self._gone or "")
        _, word, content = self._answer
        if word == mailbox.FAILED and "failure" in content:
            failure = mailbox.from_text(content["failure"])
            if isinstance(unreached := failure.exception(), Unreached):
                raise unreached
            raise Failed(failure)
        if word != self._expected():
            raise Failed(f"it answered {word.decode(errors='replace')!r}")
        return mailbox.from_text(content["result"]) if "result" in content else None


def _put(box: Mailbox, message: dict[str, Any]) -> bool:
    """Put a message there, and tell the calls of this process whose place it takes. Was it announced?"""
    for serial in box.put_message(message):
        call = _waiting.pop(serial, None)
        if call is not None:
            call.accept(_displaced(serial, box.rank))
    return box.announce()


def _displaced(serial: str, rank: int) -> Answer:
    """What a call gets as its answer, when none will come."""
    try:
        raise ProtocolError(
            f"another sender has sent weights of this model to rank {rank} before the rank took these; a model has one "
            "sender at a time, so close the one that is not used any more"
        )
    except ProtocolError as error:
        return Answer(serial, mailbox.FAILED, {**mailbox.failure(error), "untaken": True})


class WordCall(StoreCall):
    """Waits for a worker's word, where no message of ours is under way."""

    def __init__(self, courier: Courier, mailbox: Mailbox, expected: bytes) -> None:
        super().__init__(courier)
        self._mailbox = mailbox
        self._expected = expected
        self._word: bytes | None = None

    @override
    def try_once(self) -> bool:
        bell, answers, last = self._mailbox.said()
        word = next((each for each in answers if each.serial is None), None)
        if word is not None:
            self._mailbox.forget([word])
            self._word = word.word
        elif bell is not None and bell != last:  # a loop of the user's own wrote it; else it rings for what was taken
            self._word = bell
        if bell is not None and bell in (last, self._word):
            self._mailbox.silence()
        return self._word is not None

    @override
    def answer(self) -> Any:
        if self._word != self._expected:
            raise Failed(f"it answered {(self._word or b'').decode(errors='replace')!r}")
        return None


class PlaceCall(StoreCall):
    """Asks where a rank runs. Its worker writes that into the store when it is initialised."""

    def __init__(self, courier: Courier, mailbox: Mailbox) -> None:
        super().__init__(courier)
        self._mailbox = mailbox
        self._place: Place | None = None

    @override
    def try_once(self) -> bool:
        if (introduced := self._mailbox.introduced()) is not None:
            self._place = introduced[0]
        return self._place is not None

    @override
    def answer(self) -> Any:
        return self._place


class Outbox:
    """The sender's end of a mailbox."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._courier = courier_of(mailbox.store).join()
        self._left = False
        self._layout: str | None = None  # the manifest that the store has
        self._lifeline: Lifeline | None = None
        self.expected = UPDATED  # the word that the worker should answer with
        self.latest: MailCall | None = None  # an interrupt may lose it before anybody else has it

    def post(self, payload: Any, relay: RelayOptions | None = None, *, lone: bool = False, near: bool = False) -> Call:
        """Send packed weights, a delivery or an announcement.

        Args:
            payload: what to send.
            relay: the rank publishes it for its node, and answers where.
            lone: it has the node for itself, and uses what it has published.
            near: it may read the weights where they lie, if it shares memory with this process.

        Raises ProtocolError without a process group.
        """
        ticket = None
        if isinstance(payload, Delivery):
            payload, ticket = payload.packed_weights, payload.ticket if near else None
        stamp: Stamp = payload.stamp if isinstance(payload, Announcement) else payload.label.stamp
        message: dict[str, Any] = {"stamp": stamp, "from": my_rank()}
        if isinstance(payload, Announcement):
            message["announcement"] = mailbox.to_text(payload)
            return self._begin(message, payload, None)
        label = payload.label
        layout = f"{fingerprint(label.manifest):016x}"
        message.update(bytes=payload.buffer.nbytes, layout=layout, kind=label.kind)
        if label.extra:
            message["extra"] = mailbox.to_text(label.extra)
        if relay is not None:
            message["relay"] = list(relay)
        if lone:
            message["lone"] = True
        if payload.buffer.numel():
            need_group()
        return self._begin(message, payload, payload.buffer, partial(self._put_layout, layout, label.manifest), ticket)

    def _begin(
        self,
        message: dict[str, Any],
        payload: Any,
        buffer: torch.Tensor | None,
        before: Callable[[], None] = lambda: None,
        ticket: FetchTicket | None = None,
    ) -> Call:
        call = MailCall(
            self._courier,
            self._mailbox,
            self._watch,
            message,
            payload,
            buffer,
            expected=lambda: self.expected,
            before=before,
            ticket=ticket,
        )
        self.latest = call
        return call.begin()

    def _put_layout(self, layout: str, manifest: bytes) -> None:
        if layout != self._layout:
            self._mailbox.put_layout(layout, manifest)
            self._layout = layout

    def wait_word(self, word: bytes) -> Call:
        """The next word of the worker, which should be this one."""
        return WordCall(self._courier, self._mailbox, word).begin()

    def ask_place(self) -> Call:
        """Where does the rank run?"""
        return PlaceCall(self._courier, self._mailbox).begin()

    def close_relay(self, session: str, *, ended: bool) -> None:
        """Let the rank end what it relays for a sender, when it receives next. `ended`: the sender sends no more."""
        message = {"serial": new_serial(), "close": session, "ended": ended}
        task = self._courier.give(partial(_put, self._mailbox, message))
        if ended:  # the process may end next
            with contextlib.suppress(torch.distributed.DistError):
                if task.done_by(time.monotonic() + GRACE):
                    task.result()

    def _watch(self) -> Lifeline | None:
        """What tells of the worker's death, once the worker has said where it is."""
        if self._lifeline is None and (introduced := self._mailbox.introduced()) is not None:
            self._lifeline = Lifeline(*introduced)
        return self._lifeline

    def close(self) -> None:
        """Watch the worker no more. Idempotent."""
        if self._lifeline is not None:
            self._courier.give(self._lifeline.close)  # on the thread that looks at it
            self._lifeline = None
        if not self._left:
            self._left = True
            self._courier.leave()
