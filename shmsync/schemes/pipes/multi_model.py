"""Several models at one version boundary: no worker uses one of them new and another old.

Every worker first says that it waits in receive(), where no forward runs. Then everything is published, and every
worker applies all of it at once. A worker that does not come to its receive() in time calls the whole thing off.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from ...engine.deadlines import deadline_after, timeout_or_none
from ...engine.outcome import Outcome
from ...engine.source.pickling import dumps
from ...errors import AckTimeout
from ..api import WeightSyncScheme
from ..arenas.publishers import Plan, write
from ..link import messages
from ..link.gather import WORDING, deliver, forget, gather
from ..link.messages import Tag
from ..link.send_lock import SendLock, hold_all
from ..link.sender_end import Link
from ..sender import WeightSender
from .pipe_carrier import Posted
from .pipe_sender import PipeSender

_numbers = itertools.count(1)
_one_at_a_time = SendLock()  # two meetings of the same workers would wait for each other


def send_together(
    models: Mapping[Any, Any], worker_ids: int | list[int] | None = None, *, timeout: float | None = None
) -> int:
    """Send several models so that each worker switches from all old to all new at one of its receive() calls.

    Args:
        models: {sender or scheme: weights}, or {model id: (sender or scheme, weights)}; weights as in send(). The
            senders must reach the same workers over the same pipes.
        worker_ids: as in send().
        timeout: seconds for the whole call; None is the largest of the schemes' defaults.

    Returns:
        The version that all of these models have now.

    Raises:
        WriterBusy: another thread was sending one of these models until the deadline; nothing was sent.
        ValueError, ManifestMismatch, AckTimeout while the workers come together: nothing was sent.
        WorkerDied, AckTimeout, a worker's exception afterwards: as in send().
    """
    timeout = timeout_or_none(timeout)
    pairs = _pairs(models)
    deadline = deadline_after(timeout, max(sender.default_timeout for sender, _ in pairs))
    with hold_all(
        [_one_at_a_time, *(each for sender, _ in pairs for each in sender.send_locks())], deadline, "send_together"
    ):
        return _send_together(pairs, worker_ids, deadline)


def _send_together(pairs: list[tuple[PipeSender, Any]], worker_ids: int | list[int] | None, deadline: float) -> int:
    links = _living([sender for sender, _ in pairs], worker_ids)
    first = next(iter(links.values()))
    version = max(sender.carrier.next_version(sender.model_id, reached) for sender, reached in links.items())
    meeting = _Meeting([sender.model_id for sender in links], version, first, deadline)
    met = Outcome(WORDING)
    try:
        met = meeting.wait(deadline)
        if met.late:
            models = ", ".join(repr(sender.model_id) for sender in links)
            raise met.not_ready(
                "nothing was sent",
                "come to receive()",
                f"the models {models} change only together. Call receive() more often, or give more time with timeout=",
                version,
            )
        for index in met.dead:  # a worker that left is gone, whatever it has applied before
            _report(links, index, True)
        if met.failed or not met.done:
            met.check("the call to receive together", None)
        ready = {sender: {i: reached[i] for i in met.done} for sender, reached in links.items()}
        plans = [
            sender.carrier.plan(sender.model_id, sender.sent_weights(weights), ready[sender], version)
            for sender, weights in pairs
        ]
        if time.monotonic() >= deadline:  # this process was stopped, perhaps, and the workers do not wait any more
            raise AckTimeout(
                f"nothing was sent: the time was over before {', '.join(repr(sender.model_id) for sender in links)} "
                "could be written; send again, or give more time with timeout=",
                version=version,
                missing=list(first),
            )
        posted = _send_by_value(pairs, plans, version, ready, deadline)
        rest = [(pair, plan) for pair, plan in zip(pairs, plans, strict=True) if pair[0] not in posted]
        write([plan for _, plan in rest], version, deadline)
    except BaseException:
        meeting.call_off()
        for index in met.dead if met.done or met.failed else ():
            _report(links, index, False)  # this error does not name it
        raise
    try:
        posted |= {sender: sender.carrier.notify(sender.model_id, version, ready[sender]) for (sender, _), _ in rest}
        outcomes = [(sender, post, gather(post.links, post.tags, deadline)) for sender, post in posted.items()]
    except BaseException:
        meeting.call_off()
        raise
    if any(outcome.late or outcome.failed for _, _, outcome in outcomes):
        meeting.call_off()  # a late worker may have lost a message to a newer one; it keeps what it had of all models
    for sender, post, outcome in outcomes:
        sender.carrier.mark(post, outcome)
        outcome.dead = {**met.dead, **outcome.dead}
    for sender, _, outcome in outcomes:
        outcome.check(f"version {version} of {sender.model_id!r}", version)
    return version


def _send_by_value(
    pairs: list[tuple[PipeSender, Any]],
    plans: list[Plan],
    version: int,
    ready: Mapping[PipeSender, dict[int, Link]],
    deadline: float,
) -> dict[PipeSender, Posted]:
    """Where some weights go through pipes and others into arenas: bring the first to the workers.

    What lies in an arena is in use as soon as it is written, so no message of the others may be on its way then.
    """
    by_value = {pair[0]: plan for pair, plan in zip(pairs, plans, strict=True) if not plan.publications}
    if not by_value or len(by_value) == len(plans):
        return {}
    write(list(by_value.values()), version, deadline)
    posted = {sender: sender.carrier.notify(sender.model_id, version, ready[sender]) for sender in by_value}
    links = {index: link for post in posted.values() for index, link in post.links.items()}
    late = Outcome(WORDING)
    late.add_late({index: links[index].peer for index in deliver(links, deadline)})
    if late.late:
        for post in posted.values():
            forget(post.links, post.tags)
        raise late.not_ready(
            "nothing is used",
            f"take all of {', '.join(repr(sender.model_id) for sender in posted)} from the pipe",
            "the models change only together. Give more time with timeout=",
            version,
        )
    return posted


def _living(senders: list[PipeSender], worker_ids: int | list[int] | None) -> dict[PipeSender, dict[int, Link]]:
    """The workers that all of these senders reach, without those whose death one of them has reported."""
    links = {}
    for sender in senders:
        sender.check_ready("send_together")
        links[sender] = sender.links(worker_ids)
    one, first = next(iter(links.items()))
    for sender, reached in links.items():
        if reached.keys() != first.keys() or any(reached[i].end is not first[i].end for i in first):
            raise ValueError(
                f"{sender.model_id!r} and {one.model_id!r} reach different workers, or over different pipes; "
                "models that are sent together share one pipe for each worker"
            )
    for index in first:
        reported = [sender for sender, reached in links.items() if reached[index].reported]
        for sender, reached in links.items():
            if reported and not reached[index].reported and not reached[index].dead:
                raise ValueError(
                    f"worker {index} was registered again for {sender.model_id!r}, but not for "
                    f"{reported[0].model_id!r}, where it is dead; register it with every sender"
                )
        if reported:
            _report(links, index, True)
    return {sender: sender.carrier.reach(sender.model_id, reached) for sender, reached in links.items()}


def _report(links: Mapping[PipeSender, Mapping[int, Link]], index: int, reported: bool) -> None:
    for reached in links.values():
        reached[index].reported = reported


class _Meeting:
    """The workers, on their way to a receive() in which they stay until all models are there."""

    def __init__(self, model_ids: list[str], version: int, links: Mapping[int, Link], deadline: float) -> None:
        self._number = next(_numbers)
        self._content = (tuple(model_ids), (self._number, version, deadline))
        self._links = links
        self._tag = Tag(messages.PREPARE, self._number)

    def wait(self, deadline: float) -> Outcome:
        """The workers that arrived by the deadline. The caller cancels the meeting if an error is raised."""
        payload = dumps((self._content, messages.PREPARE))
        for link in self._links.values():
            link.end.send(payload, self._tag)
        return gather(self._links, {index: [self._tag] for index in self._links}, deadline)

    def call_off(self) -> None:
        """Let them go on with what they have."""
        payload = dumps((self._content, messages.RESUME))
        for link in self._links.values():
            if not link.channel.closed:
                link.channel.send(payload)


def _pairs(models: Mapping[Any, Any]) -> list[tuple[PipeSender, Any]]:
    pairs = []
    for key, value in models.items():
        sender, weights = (
            (key, value) if not isinstance(key, str) else value if isinstance(value, tuple) else (value, None)
        )
        if isinstance(sender, WeightSyncScheme):
            sender = sender.get_sender()
        if not isinstance(sender, WeightSender):
            raise ValueError(
                f"send_together() takes senders or schemes and their weights, not a {type(sender).__name__}"
            )
        if not sender.sends:
            continue  # its workers keep what they have
        if not isinstance(sender, PipeSender):
            raise ValueError(
                f"send_together() reaches workers over pipes, and {sender.model_id!r} is sent by a "
                f"{type(sender).__name__}; send it separately"
            )
        if isinstance(key, str) and key != sender.model_id:
            raise ValueError(f"the sender given for {key!r} sends {sender.model_id!r}")
        pairs.append((sender, weights))
    if not pairs:
        raise ValueError("send_together() got no model that is sent over pipes")
    return pairs
