"""The sender's side: messages for a rank, until they are answered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from ....memory.manifest import fingerprint
from ..parcel import Announcement, Stamp
from ..place import Place
from ..relay import RelayOptions
from ..requests import Call, Failed, Gone
from . import mailbox
from .lifeline import Lifeline
from .mailbox import Answer, Mailbox, new_serial, tag_of
from .transfers import my_rank

# By serial number. A rank may take a message although its sender has given up. It waits for the bytes then, so they and
# their transfer stay.
_unanswered: dict[str, MailCall] = {}


class MailCall(Call):
    """A message for one rank, until its answer is there."""

    def __init__(
        self,
        mailbox: Mailbox,
        watch: Callable[[], Lifeline | None],
        message: dict[str, Any],
        payload: Any,
        buffer: torch.Tensor | None,
    ) -> None:
        self.payload = payload
        self._mailbox = mailbox
        self._watch = watch
        self._serial = message["serial"] = new_serial()
        self._answer: Answer | None = None
        self._taking = False  # an answer; still True after an interrupt
        self._gone: str | None = None
        if (lifeline := watch()) is not None and lifeline.dead:
            raise Gone(f"rank {mailbox.rank}, {lifeline}")
        if buffer is not None and buffer.numel():
            _unanswered[self._serial] = self
            try:  # before the announcement: without it nobody takes the bytes, while it would wait for them
                self._work = torch.distributed.isend(buffer, mailbox.rank, tag=tag_of(self._serial))
            except RuntimeError as error:
                del _unanswered[self._serial]
                raise Gone(f"torch.distributed: {str(error)[:200]}") from error
        self._mailbox.put_message(message)

    @override
    def finished(self) -> bool:
        if self._answer is None and self._gone is None:
            # Its death first: what it wrote, it wrote before.
            lifeline = self._watch()
            dead = lifeline is not None and lifeline.dead
            if self._taking:
                self._see(self._mailbox.last_answer())
            while self._answer is None and self._mailbox.has("out"):
                self._taking = True
                self._see(self._mailbox.take_answer(self._serial))
            if self._answer is None and dead:
                self._gone = f"rank {self._mailbox.rank}, {lifeline}"
                _unanswered.pop(self._serial, None)
        return self._answer is not None or self._gone is not None

    def _see(self, answer: Answer | None) -> None:
        if answer is not None:
            if answer.serial is not None and not answer.content.get("untaken"):
                _unanswered.pop(answer.serial, None)  # perhaps of a call that nobody looks at any more
            if answer.serial == self._serial:
                self._answer = answer
        self._taking = False

    @override
    def result(self) -> Any:
        if self._answer is None:
            raise Gone(self._gone or "")
        _, word, content = self._answer
        if word == mailbox.FAILED:
            raise Failed(mailbox.from_text(content["failure"]))
        if word != mailbox.UPDATED:
            raise Failed(f"it answered {word.decode()!r}")
        return mailbox.from_text(content["result"]) if "result" in content else None


class PlaceCall(Call):
    """Asks where a rank runs. Its worker writes that into the store when it is initialised."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._place: Place | None = None

    @override
    def finished(self) -> bool:
        if self._place is None and (introduced := self._mailbox.introduced()) is not None:
            self._place = introduced[0]
        return self._place is not None

    @override
    def result(self) -> Any:
        return self._place


class Outbox:
    """The sender's end of a mailbox."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._layout: str | None = None  # the manifest that the store has
        self._lifeline: Lifeline | None = None

    def post(self, payload: Any, relay: RelayOptions | None = None) -> Call:
        """Send a parcel or an announcement. `relay`: the rank publishes it for its node, and answers where."""
        stamp: Stamp = payload.stamp if isinstance(payload, Announcement) else payload.label.stamp
        message: dict[str, Any] = {"stamp": stamp, "from": my_rank()}
        if isinstance(payload, Announcement):
            message["announcement"] = mailbox.to_text(payload)
            return MailCall(self._mailbox, self._watch, message, payload, None)
        label = payload.label
        layout = f"{fingerprint(label.manifest):016x}"
        if layout != self._layout:
            self._mailbox.put_layout(layout, label.manifest)
            self._layout = layout
        message.update(bytes=payload.buffer.nbytes, layout=layout, kind=label.kind)
        if label.extra:
            message["extra"] = mailbox.to_text(label.extra)
        if relay is not None:
            message["relay"] = list(relay)
        return MailCall(self._mailbox, self._watch, message, payload, payload.buffer)

    def ask_place(self) -> Call:
        """Where does the rank run?"""
        return PlaceCall(self._mailbox)

    def close_relay(self, session: str, *, ended: bool) -> None:
        """Let the rank end what it relays for a sender, when it receives next. `ended`: the sender sends no more."""
        with contextlib.suppress(torch.distributed.DistError):
            self._mailbox.put_message({"serial": new_serial(), "close": session, "ended": ended})

    def _watch(self) -> Lifeline | None:
        """What tells of the worker's death, once the worker has said where it is."""
        if self._lifeline is None and (introduced := self._mailbox.introduced()) is not None:
            self._lifeline = Lifeline(*introduced)
        return self._lifeline

    def close(self) -> None:
        """Watch the worker no more. Idempotent."""
        if self._lifeline is not None:
            self._lifeline.close()
