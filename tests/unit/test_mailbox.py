"""Messages and answers through a store: right however the requests of the two sides fall between each other."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from torch.distributed import FileStore, HashStore

from shmsync.schemes.remote.distributed.mailbox import UPDATED, Mailbox, to_text
from shmsync.schemes.remote.distributed.requests import MailCall
from shmsync.schemes.remote.requests import Failed

REQUESTS = 14  # one side's; more than any of these tests makes


class Interleaved:
    """A store, in which the other side's requests are carried out between those of the one that uses it.

    Args:
        store: the real one.
    """

    def __init__(self, store):
        self._store = store
        self._others = []
        self._count = 0

    def begin(self, others):
        """From now on: (when, request), before the `when`-th request made here, in order."""
        self._others = list(others)
        self._count = 0

    def __getattr__(self, name):
        def request(*args):
            self._let_others(self._count)
            self._count += 1
            return getattr(self._store, name)(*args)

        return request

    def _let_others(self, until):
        while self._others and self._others[0][0] <= until:
            self._others.pop(0)[1]()

    def finish(self):
        """Carry out what is left."""
        self._let_others(REQUESTS)


class Requests:
    """Notes requests instead of making them."""

    def __init__(self, store):
        self.noted = []
        self._store = store

    def set(self, key, value):
        self.noted.append(lambda: self._store.set(key, value))


def orders(count):
    return combinations_with_replacement(range(REQUESTS + 1), count)


def make_store(tmp_path=None):
    return HashStore() if tmp_path is None else FileStore(str(tmp_path / "store"), 1)


def serials_taken(mailbox):
    taken = []
    while mailbox.has("in"):
        message = mailbox.take_message()
        if message is not None:
            taken.append(message["serial"])
    return taken


@pytest.mark.parametrize("first", ["nothing", "an old message"])
def test_a_message_is_taken_once_however_the_sides_meet(first):
    for order in orders(2):
        store = make_store()
        if first == "an old message":
            Mailbox(store, 1).put_message({"serial": "old"})
        sent = Requests(store)
        Mailbox(sent, 1).put_message({"serial": "new"})
        interleaved = Interleaved(store)
        interleaved.begin(zip(order, sent.noted, strict=True))
        taken = serials_taken(Mailbox(interleaved, 1))
        interleaved.finish()
        taken += serials_taken(Mailbox(store, 1))
        assert taken in (["new"], ["old", "new"]), order
        if first == "nothing":
            assert taken == ["new"], order


def make_call(store):
    """A message for rank 1 without bytes, and its serial number."""
    message = {}
    call = MailCall(Mailbox(store, 1), lambda: None, message, None, None)
    return call, message["serial"]


def test_a_late_answer_takes_nothing_from_the_next_one():
    for order in orders(4):
        store = make_store()
        interleaved = Interleaved(store)
        _, old = make_call(interleaved)
        call, serial = make_call(interleaved)
        given = Requests(store)
        Mailbox(given, 1).put_answer(old, UPDATED, {"result": to_text("old")})
        Mailbox(given, 1).put_answer(serial, UPDATED, {"result": to_text("new")})
        interleaved.begin(zip(order, given.noted, strict=True))
        while not call.finished():
            pass  # each look counts
        assert call.result() == "new", order
        interleaved.finish()
        following, _ = make_call(store)  # a bell that still rings is none for it
        assert not following.finished(), order


def test_an_interrupt_between_bell_and_answer_loses_neither():
    class Interrupted(Mailbox):
        def _hear(self, bell):
            super()._hear(bell)
            raise KeyboardInterrupt

    store = make_store()
    message = {}
    call = MailCall(Interrupted(store, 1), lambda: None, message, None, None)
    Mailbox(store, 1).put_answer(message["serial"], UPDATED, {"result": to_text(1)})
    with pytest.raises(KeyboardInterrupt):
        call.finished()
    assert call.finished()
    assert call.result() == 1


def test_a_word_alone_is_an_answer_of_those_who_never_gave_another():
    store = make_store()
    call, _ = make_call(store)
    store.set("NODE_1_out", UPDATED)
    assert call.finished() and call.result() is None
    call, serial = make_call(store)
    Mailbox(store, 1).put_answer(serial, UPDATED, {})
    assert call.finished()
    call, _ = make_call(store)
    store.set("NODE_1_out", UPDATED)  # as it might be left over from the last one
    assert not call.finished()
    store.set("NODE_1_out", "nonsense")
    assert call.finished()
    with pytest.raises(Failed, match="nonsense"):
        call.result()


def test_an_announcement_without_a_message_says_who_must_write_it():
    store = make_store()
    store.set("NODE_1_in", "update_weights")
    with pytest.raises(RuntimeError, match="send with DistributedTransport"):
        Mailbox(store, 1).take_message()
    assert not Mailbox(store, 1).has("in")


def test_a_store_in_a_file_does_as_well(tmp_path):
    mailbox = Mailbox(make_store(tmp_path), 1)
    mailbox.put_message({"serial": "a"})
    assert serials_taken(mailbox) == ["a"]
    mailbox.put_message({"serial": "b"})
    mailbox.put_message({"serial": "c"})
    assert serials_taken(mailbox) == ["c"]
    mailbox.put_answer("c", UPDATED, {})
    assert mailbox.take_answer("c").serial == "c"
