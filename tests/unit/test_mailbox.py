"""Messages and answers through a store: right however the requests of the two sides fall between each other."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from torch.distributed import FileStore, HashStore

from shmsync.schemes.remote.distributed.courier import Courier
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
    """A message for rank 1 without bytes, posted, and its serial number. The test is the courier."""
    message = {}
    call = MailCall(Courier(), Mailbox(store, 1), lambda: None, message, None, None)
    call.look()
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
        while not call.look():
            pass  # each look counts
        assert call.result() == "new", order
        interleaved.finish()
        following, _ = make_call(store)  # a bell that still rings is none for it
        assert not following.look(), order


def test_a_word_alone_is_an_answer_of_those_who_never_gave_another():
    store = make_store()
    call, _ = make_call(store)
    store.set("NODE_1_out", UPDATED)
    assert call.look() and call.result() is None
    call, serial = make_call(store)
    Mailbox(store, 1).put_answer(serial, UPDATED, {})
    assert call.look()
    call, _ = make_call(store)
    store.set("NODE_1_out", UPDATED)  # as it might be left over from the last one
    assert not call.look()


def test_a_foreign_word_is_an_answer_only_where_answers_have_no_serial_number():
    store = make_store()
    call, _ = make_call(store)
    store.set("NODE_1_out", "nonsense")
    assert call.look()
    with pytest.raises(Failed, match="nonsense"):
        call.result()
    call, serial = make_call(store)
    Mailbox(store, 1).put_answer(serial, UPDATED, {})
    assert call.look()
    call, serial = make_call(store)
    store.set("NODE_1_out", "a word for somebody else")
    assert not call.look()
    assert store.get("NODE_1_out") == b"a word for somebody else"
    Mailbox(store, 1).put_answer(serial, UPDATED, {})
    store.set("NODE_1_out", "another one")  # over the bell
    assert call.look() and call.result() is None
    assert store.get("NODE_1_out") == b"another one"


def test_a_message_is_taken_although_another_has_heard_its_announcement():
    store = make_store()
    Mailbox(store, 1).put_message({"serial": "a"})
    store.delete_key("NODE_1_in")
    assert Mailbox(store, 1).take_message() == {"serial": "a"}


def test_a_foreign_announcement_stays_and_hides_nothing():
    store = make_store()
    mailbox = Mailbox(store, 1)
    store.set("NODE_1_in", "shutdown")
    assert mailbox.take_message() is None
    mailbox.put_message({"serial": "a"})
    store.set("NODE_1_in", "shutdown")
    assert mailbox.take_message() == {"serial": "a"}
    assert store.get("NODE_1_in") == b"shutdown"


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
