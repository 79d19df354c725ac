"""Messages and answers through a store: right however the requests of the two sides fall between each other."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from torch.distributed import FileStore, HashStore

from shmsync.schemes.remote._mailbox import UPDATED, Mailbox

REQUESTS = 14  # one side's; more than any of these tests makes


class Interleaved:
    """A store, in which the other side's requests are carried out between those of the one that uses it.

    Args:
        store: the real one.
        others: (when, request): before the `when`-th request made here, in order.
    """

    def __init__(self, store, others):
        self._store = store
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
        interleaved = Interleaved(store, zip(order, sent.noted, strict=True))
        taken = serials_taken(Mailbox(interleaved, 1))
        interleaved.finish()
        taken += serials_taken(Mailbox(store, 1))
        assert taken in (["new"], ["old", "new"]), order
        if first == "nothing":
            assert taken == ["new"], order


def test_a_late_answer_takes_nothing_from_the_next_one():
    for order in orders(4):
        store = make_store()
        given = Requests(store)
        worker = Mailbox(given, 1)
        worker.put_answer("old", UPDATED, {"result": 1})
        worker.put_answer("new", UPDATED, {"result": 2})
        interleaved = Interleaved(store, zip(order, given.noted, strict=True))
        sender = Mailbox(interleaved, 1)
        answers = []
        for mailbox in (sender, Mailbox(store, 1)):
            while not answers and mailbox.has("out"):
                if (answer := mailbox.take_answer("new")) is not None:
                    answers.append(answer)
            interleaved.finish()
        assert [(word, content["result"]) for word, content in answers] == [(UPDATED, 2)], order
        # A bell that still rings is none for what comes next.
        assert not sender.has("out") or sender.take_answer("next") is None, order


def test_a_word_alone_is_an_answer_of_those_who_never_gave_another():
    store = make_store()
    mailbox = Mailbox(store, 1)
    store.set("NODE_1_out", UPDATED)
    assert mailbox.take_answer("first") == (UPDATED, {})
    mailbox.put_answer("first", UPDATED, {})
    assert mailbox.take_answer("second") is None
    store.set("NODE_1_out", UPDATED)  # as it might be left over from the first
    assert mailbox.take_answer("second") is None
    store.set("NODE_1_out", "nonsense")
    assert mailbox.take_answer("second") == (b"nonsense", {})


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
    assert mailbox.take_answer("c") is not None
