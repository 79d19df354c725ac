"""The two ends of a rank's connection: right in whatever order their steps come, and whatever dies or lies."""

from __future__ import annotations

import os
import pickle
import time

import pytest
import torch
from torch.distributed import FileStore, HashStore

from shmsync.schemes.remote.distributed.rank_inbox import Inbox
from shmsync.schemes.remote.distributed.rank_messages import RankAnswer, RankMessage
from shmsync.schemes.remote.distributed.rank_sender import RankEnd, wait_for
from shmsync.schemes.remote.location import here
from shmsync.schemes.remote.packed_weights import Packer
from shmsync.schemes.remote.remote_requests import Gone
from support.processes import until
from support.remote import ranks

SOON = 20.0  # seconds; far more than anything here takes


class Ends:
    """Ends over one store, which are closed at the end of the test."""

    def __init__(self):
        self.store, self._made = HashStore(), []

    def sender(self):
        self._made.append(RankEnd(self.store, 1))
        return self._made[-1]

    def worker(self):
        self._made.append(Inbox(self.store, 1))
        self._made[-1].introduce()
        return self._made[-1]

    def close(self):
        for each in self._made:
            each.close()


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.close()


def post(end, version=1):
    """A message without bytes, so that no process group is needed."""
    return end.post(Packer().pack({"none": torch.empty(0)}, "policy", version))


def posted(end, version=1):
    call = post(end, version)
    until(lambda: call.sent)
    return call


def take(inbox, seconds=SOON, **kwargs):
    return inbox.next(time.monotonic() + seconds, **kwargs)


def version_of(inbox, received):
    return inbox.unpack(received).stamp.version


def finish(call):
    wait_for([call], SOON)
    assert call.finished()
    return call.result()


def exchange(inbox, end, version=1):
    """A message, and its answer."""
    call = posted(end, version)
    received = take(inbox)
    assert version_of(inbox, received) == version
    inbox.answer(received)
    assert finish(call) is None


def test_a_message_that_was_posted_before_the_worker_was_there_is_answered(ends):
    end = ends.sender()
    call, location = post(end), end.ask_location()
    assert not call.finished()
    inbox = ends.worker()
    assert finish(location) == here()
    received = take(inbox)
    assert version_of(inbox, received) == 1 and not call.finished()
    inbox.answer(received)
    assert finish(call) is None
    assert not end.busy


def test_a_late_answer_takes_nothing_from_the_next_one(ends):
    inbox, end = ends.worker(), ends.sender()
    late, call = posted(end, 1), posted(end, 2)
    first = take(inbox)
    inbox.answer(first, "late")
    wait_for([call], 0.05)
    assert late.finished() and not call.finished()
    inbox.answer(take(inbox))
    assert finish(call) is None


def test_a_proved_sender_that_sends_no_messages_is_disconnected_and_harms_nobody(ends):
    inbox, liar, end = ends.worker(), ends.sender(), ends.sender()
    posted(liar)
    inbox.answer(take(inbox))
    for wrong in (("weights", 3), RankAnswer(1, "updated"), RankMessage("one", "bytes", b"", 0, 0, None)):
        liar.channel.send(pickle.dumps(wrong))
        with pytest.raises(RuntimeError, match="no message of this scheme"):
            take(inbox)
        again = posted(liar)  # it connects again
        inbox.answer(take(inbox))
        until(again.finished)
    exchange(inbox, end)


@pytest.mark.parametrize("garbage", ["no answer", "no header"])
def test_a_worker_that_sends_no_answers_is_gone_and_may_come_back(ends, garbage):
    inbox, end = ends.worker(), ends.sender()
    call = posted(end)
    channel = take(inbox).channel
    if garbage == "no answer":
        channel.send(pickle.dumps("updated"))
    else:
        os.write(channel.fd, b"\xff\xff\xff\xfe garbage")
    with pytest.raises(Gone) as caught:
        finish(call)
    assert not caught.value.final


def test_a_worker_that_has_closed_its_end_is_gone_for_good(ends):
    inbox, end = ends.worker(), ends.sender()
    call = posted(end)
    inbox.close()
    with pytest.raises(Gone, match=f"rank 1, pid {os.getpid()}") as caught:
        finish(call)
    assert caught.value.final
    for later in (post(end), end.ask_location(), end.wait_word("done")):
        with pytest.raises(Gone):
            finish(later)


@pytest.fixture
def process(start, tmp_path):
    """(an end, the process of the rank that it reaches)."""
    path, worker = str(tmp_path / "store"), start()
    worker.call(ranks.listen, path)
    worker.start(ranks.answer_all)
    end = RankEnd(FileStore(path, 2), 1)
    yield end, worker
    end.close()


@pytest.mark.parametrize("when", ["before it was reached", "idle", "under way"])
def test_a_killed_worker_is_gone(process, when):
    end, worker = process
    if when != "before it was reached":
        assert finish(post(end)) is None
    if when == "under way":
        worker.stop()
        call = posted(end)
    worker.kill()
    if when != "under way":
        call = post(end)
    with pytest.raises(Gone, match=f"pid {worker.pid} ") as caught:
        finish(call)
    assert caught.value.final
