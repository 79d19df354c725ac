"""Messages for a rank, until they are answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..place import Place
from ..requests import Call, Failed, Gone
from . import mailbox
from .lifeline import Lifeline
from .mailbox import Answer, Mailbox, new_serial
from .transfers import isend, tag_of

# By serial number. A rank may take a message whose sender was given up. It waits for the bytes then, so they and their
# transfer stay.
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
                self._work = isend(buffer, mailbox.rank, tag_of(self._serial))
            except RuntimeError as error:
                del _unanswered[self._serial]
                raise Gone(f"torch.distributed: {str(error)[:200]}") from error
        self._mailbox.put_message(message)

    def finished(self) -> bool:
        """As in Call."""
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

    def result(self) -> Any:
        """As in Call."""
        if self._answer is None:
            raise Gone(self._gone or "")
        _, word, content = self._answer
        if word == mailbox.FAILED:
            raise Failed(mailbox.from_text(content["failure"]))
        if word != mailbox.UPDATED:
            raise Failed(f"it answered {word.decode()!r}")
        return mailbox.from_text(content["result"]) if "result" in content else None


class PlaceCall(Call):
    """The question where a rank is; its worker answers when it is initialised."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._place: Place | None = None

    def finished(self) -> bool:
        """As in Call."""
        if self._place is None and (introduced := self._mailbox.introduced()) is not None:
            self._place = introduced[0]
        return self._place is not None

    def result(self) -> Any:
        """As in Call."""
        return self._place
