"""Messages and answers through a store: right however the requests of the two sides fall between each other."""

from __future__ import annotations

import threading
from itertools import combinations_with_replacement, permutations

import pytest
from torch.distributed import FileStore, HashStore

from shmsync import ProtocolError
from shmsync.schemes.remote.distributed.rank_requests import MailCall, WordCall
from shmsync.schemes.remote.distributed.store_channel import UPDATED, Mailbox, to_text
from shmsync.schemes.remote.distributed.store_poller import Courier
from shmsync.schemes.remote.remote_requests import Failed

REQUESTS = 7  # of one side that a request of the other may fall between; what is left comes at the end


class Other:
    """The other side: a function that uses a Mailbox of the store, and makes one request of it at each step().

    Args:
        store: the real one.
        function: gets the Mailbox.
    """

    def __init__(self, store, function):
        self._store = store
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = False
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function):
        function(Mailbox(self, 1))
        self._go.acquire()
        self.ended = True
        self._done.release()

    def __getattr__(self, name):
        def request(*args):
            self._go.acquire()
            result = getattr(self._store, name)(*args)
            self._done.release()
            return result

        return request

    def step(self):
        if not self.ended:
            self._go.release()
            self._done.acquire()

    def finish(self):
        while not self.ended:
            self.step()
        self._thread.join()


class Interleaved:
    """A store, in which the other side's requests are carried out between those of the one that uses it.

    Args:
        store: the real one.
    """

    def __init__(self, store):
        self._store = store
        self._other = None
        self._order = []
        self._count = 0

    def begin(self, order, function):
        """From now on, before each request made here whose number is in `order`, in order, the other side makes one."""
        self._other = Other(self._store, function)
        self._order = list(order)
        self._count = 0

    def __getattr__(self, name):
        def request(*args):
            while self._order and self._order[0] <= self._count:
                self._order.pop(0)
                self._other.step()
            self._count += 1
            return getattr(self._store, name)(*args)

        return request

    def finish(self):
        """Carry out what is left."""
        self._other.finish()


def orders(count):
    return combinations_with_replacement(range(REQUESTS + 1), count)


def make_store(tmp_path=None):
    return HashStore() if tmp_path is None else FileStore(str(tmp_path / "store"), 1)


def post(mailbox, message):
    mailbox.put_message(message)
    mailbox.announce()


def serials_taken(mailbox):
    taken = []
    while (message := mailbox.take_message()) is not None:
        taken.append(message["serial"])
    return taken


@pytest.mark.parametrize("first", ["nothing", "an old message", "the end of a relay"])
def test_a_message_is_taken_once_however_the_sides_meet(first):
    for order in orders(3):
        store = make_store()
        if first != "nothing":
            post(Mailbox(store, 1), {"serial": "old"} | ({"close": "x"} if first == "the end of a relay" else {}))
        interleaved = Interleaved(store)
        interleaved.begin(order, lambda mailbox: post(mailbox, {"serial": "new"}))
        taken = serials_taken(Mailbox(interleaved, 1))
        interleaved.finish()
        taken += serials_taken(Mailbox(store, 1))
        if first == "an old message":
            assert taken in (["new"], ["old", "new"]), order
        else:
            assert taken == (["new"] if first == "nothing" else ["old", "new"]), order
        assert Mailbox(store, 1).peek("in") is None, order


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

        def answer(mailbox, old=old, serial=serial):
            mailbox.put_answer(old, UPDATED, {"result": to_text("old")})
            mailbox.put_answer(serial, UPDATED, {"result": to_text("new")})

        interleaved.begin(order, answer)
        stepping_on(interleaved, call)
        assert call.result() == "new", order
        interleaved.finish()
        following, _ = make_call(store)  # a bell that still rings is none for it
        assert not following.look(), order


def stepping_on(interleaved, call):
    """Look until it is finished; when the order is used up the other side goes on."""
    while not call.look():
        if not interleaved._order:
            interleaved._other.step()


@pytest.mark.parametrize("words", [["updated", "done"], ["done", "updated"], ["updated", "done", "done"]], ids=str)
def test_nothing_that_a_worker_says_is_lost_however_the_sides_meet(words):
    """`updated` answers the message; each other word is one of its own."""
    for order in orders(6):
        store = make_store()
        interleaved = Interleaved(store)
        call, serial = make_call(interleaved)

        def say(mailbox, serial=serial):
            for word in words:
                mailbox.put_answer(serial if word == "updated" else None, word.encode(), {})

        interleaved.begin(order, say)
        stepping_on(interleaved, call)
        assert call.result() is None, order
        for word in [each for each in words if each != "updated"]:
            found = WordCall(Courier(), Mailbox(interleaved, 1), word.encode())
            stepping_on(interleaved, found)
            assert found.result() is None, order
        interleaved.finish()
        assert not WordCall(Courier(), Mailbox(store, 1), b"done").look(), order  # and none comes twice
        following, _ = make_call(store)
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


ORDERS = sorted(
    order
    for order in set(permutations(["a posts", "a looks", "b posts", "b looks", "worker", "worker"]))
    if order.index("a posts") < order.index("a looks") and order.index("b posts") < order.index("b looks")
)


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_a_sender_that_looks_for_its_answer_takes_no_other_senders(order):
    """After an interrupted send the courier still looks for the answer, when another sender may be there already."""
    store = make_store()
    calls, answered = {}, []

    def step(what):
        if what == "worker":
            message = Mailbox(store, 1).take_message(listen=False)
            if message is not None:
                Mailbox(store, 1).put_answer(message["serial"], UPDATED, {"result": to_text(message["serial"])})
                answered.append(message["serial"])
        elif what.endswith("posts"):
            calls[what[0]] = make_call(store)
        else:
            calls[what[0]][0].look()

    for what in (*order, "worker", "a looks", "b looks"):
        step(what)
    for call, serial in calls.values():
        assert call.finished()
        if serial in answered:
            assert call.result() == serial
        else:
            with pytest.raises(Failed) as displaced:
                call.result()
            with pytest.raises(ProtocolError, match="another sender has sent weights of this model to rank 1"):
                raise displaced.value.failure.exception()
    assert list(calls.values())[-1][1] in answered


def test_a_message_is_taken_although_another_has_heard_its_announcement():
    store = make_store()
    post(Mailbox(store, 1), {"serial": "a"})
    store.delete_key("NODE_1_in")
    assert Mailbox(store, 1).take_message() == {"serial": "a"}


def test_a_foreign_announcement_stays_and_hides_nothing():
    store = make_store()
    mailbox = Mailbox(store, 1)
    store.set("NODE_1_in", "shutdown")
    assert mailbox.take_message() is None
    post(mailbox, {"serial": "a"})
    store.set("NODE_1_in", "shutdown")
    assert mailbox.take_message() == {"serial": "a"}
    assert store.get("NODE_1_in") == b"shutdown"


def test_an_announcement_without_a_message_says_who_must_write_it():
    store = make_store()
    store.set("NODE_1_in", "update_weights")
    with pytest.raises(RuntimeError, match="send with DistributedTransport"):
        Mailbox(store, 1).take_message()
    assert Mailbox(store, 1).peek("in") is None


def test_a_store_in_a_file_does_as_well(tmp_path):
    mailbox = Mailbox(make_store(tmp_path), 1)
    post(mailbox, {"serial": "a"})
    assert serials_taken(mailbox) == ["a"]
    post(mailbox, {"serial": "b"})
    post(mailbox, {"serial": "c"})
    assert serials_taken(mailbox) == ["c"]
    mailbox.put_answer("c", UPDATED, {})
    mailbox.put_answer(None, b"done", {})
    answered, word = mailbox.said().answers
    assert (answered.serial, word.word) == ("c", b"done")
    mailbox.forget([answered])
    assert mailbox.said().answers == [word]
