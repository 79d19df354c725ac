"""Weights that a worker fetches from a weight server, from shared memory or over a connection. Both ends are here."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import secrets
import socket
import time
import weakref

import pytest
import torch

from shmsync.errors import WriterDied
from shmsync.schemes.link.proved import NONCE, PROOF, proof
from shmsync.schemes.link.serial_executor import SerialExecutor
from shmsync.schemes.remote import packed_weights
from shmsync.schemes.remote.delivery import APART, EACH
from shmsync.schemes.remote.distributed.distributed_scheme import DistributedCarrier
from shmsync.schemes.remote.location import Location, here
from shmsync.schemes.remote.packed_weights import Packer, allow_views
from shmsync.schemes.remote.remote_requests import Destination, Unreached
from shmsync.schemes.remote.weight_client import fetch, forget_ended, opened
from shmsync.schemes.remote.weight_server import ASK, REPLY, TAKE
from support.calls import forked_child
from support.holdings import mapping_at
from support.processes import until

COUNT = 100_000  # elements of a leaf


def elsewhere() -> Location:
    """As a worker on another node has it."""
    return here("another node")


class Reader:
    """Reads weights."""


class Sender:
    """Packs and ships. Its tickets say that the fetching process is at `where`."""

    def __init__(self, where=here):
        self.packer = Packer(shared_from=APART)
        self.carrier = DistributedCarrier()
        self.where = where

    def ship(self, value, version=1, seconds=math.inf):
        weights = {"a": torch.full((COUNT,), float(value)), "b": torch.full((3,), float(value))}
        packed_weights = self.packer.pack(weights, "policy", version)
        return self.carrier.ship(packed_weights, seconds, lambda start: start(None))

    def ticket(self, delivery):
        return delivery.ticket._replace(where=self.where)


@pytest.fixture(autouse=True)
def only_readers(monkeypatch):
    """The readers of this process are those of the test: another test may have left one that is not collected yet."""
    monkeypatch.setattr(packed_weights, "_readers", weakref.WeakKeyDictionary())


@pytest.fixture
def sender():
    made = Sender()
    yield made
    made.carrier.close()
    gc.collect()
    until(lambda: forget_ended() or True)


@pytest.fixture
def reader():
    made = Reader()
    allow_views(made, "policy")
    return made


def values(weights):
    return {float(tensor.min()) for tensor in weights.values()} | {float(tensor.max()) for tensor in weights.values()}


@pytest.mark.parametrize("where", [here, elsewhere], ids=["near", "far"])
def test_weights_are_fetched_by_views_for_who_only_reads_and_as_a_copy_by_others(sender, where):
    sender.where, reader = where, Reader()
    allow_views(reader, "policy")
    for version in (1, 2, 3):
        delivery = sender.ship(version, version)
        weights = opened(sender.ticket(delivery))
        assert values(weights) == {float(version)} and weights.stamp.version == version
        permissions, _, path = mapping_at(weights["a"].data_ptr())
        assert ("shmsync-weights" in path) == (where is here)
        assert where is elsewhere or permissions == "r--s"
    del reader
    gc.collect()
    weights = fetch(sender.ticket(delivery))
    assert "shmsync-weights" not in mapping_at(weights["a"].data_ptr())[2]
    weights["a"].fill_(7)  # harms no other reader
    assert values(fetch(sender.ticket(delivery))) == {3.0}


def test_the_memory_of_weights_that_somebody_still_reads_is_not_written_again(sender, reader):
    first = sender.ship(1)
    kept = fetch(sender.ticket(first))
    del first
    gc.collect()
    for value in range(2, 8):
        delivery = sender.ship(value)
        assert values(fetch(sender.ticket(delivery))) == {float(value)}
        assert values(kept) == {1.0}


def test_a_forked_child_that_drops_its_copy_of_views_leaves_them_to_its_parent(sender, reader):
    delivery = sender.ship(1)
    kept = [fetch(sender.ticket(delivery))]
    read = weakref.ref(delivery.packed_weights)
    del delivery
    os.waitpid(forked_child(lambda: [kept.clear(), gc.collect()]), 0)
    assert values(fetch(sender.ticket(sender.ship(2)))) == {2.0}  # over the same connection: all before it was heard
    assert read() is not None and values(kept[0]) == {1.0}


def test_memory_that_nobody_reads_any_more_is_used_again(sender, reader):
    seen = set()
    for value in range(8):
        delivery = sender.ship(value)
        seen.add(delivery.ticket.memory.inode)
        assert values(fetch(sender.ticket(delivery))) == {float(value)}
        gone = weakref.ref(delivery.packed_weights)
        del delivery
        until(lambda gone=gone: gone() is None)  # the weight server has heard that it was read
    assert len(seen) <= 2


def test_a_buffer_that_was_received_into_takes_no_other_weights_while_views_of_it_live(sender, reader):
    sender.where = elsewhere
    first = sender.ship(1)
    kept = fetch(sender.ticket(first))
    del first
    second, third = sender.ship(2), sender.ship(3)
    assert values(fetch(sender.ticket(second))) == {2.0}
    assert values(kept) == {1.0}
    address = kept["a"].data_ptr()
    del kept
    gc.collect()
    weights = fetch(sender.ticket(third))
    assert weights["a"].data_ptr() == address


def test_weights_that_were_given_up_are_an_error_that_says_so(sender):
    ticket = sender.ticket(sender.ship(1))
    gc.collect()
    with pytest.raises(WriterDied, match="given these weights up"):
        fetch(ticket)
    delivery = sender.ship(2)
    assert values(fetch(sender.ticket(delivery))) == {2.0}  # over the same connection


def connect(ticket, key):
    """A client that knows this key."""
    client = socket.create_connection((ticket.weight_server.host, ticket.weight_server.port))
    client.settimeout(60)
    ours = secrets.token_bytes(NONCE)
    client.sendall(ours + proof(key, b"dialler", ours))
    return client


def test_who_does_not_know_the_key_gets_nothing(sender):
    delivery = sender.ship(1)
    ticket = sender.ticket(delivery)
    with connect(ticket, bytes(PROOF)) as stranger:
        stranger.sendall(ASK.pack(TAKE, ticket.number))
        heard = b""
        try:
            while more := stranger.recv(1 << 16):
                heard += more
        except ConnectionResetError:
            pass
        assert heard == b""
    with connect(ticket, ticket.weight_server.secret) as friend:
        friend.sendall(ASK.pack(TAKE, ticket.number))
        friend.settimeout(None)
        assert (
            len(friend.recv(PROOF + REPLY.size + ticket.size, socket.MSG_WAITALL)) == PROOF + REPLY.size + ticket.size
        )


def test_a_client_that_reads_nothing_keeps_no_other_one(sender):
    sender.where = elsewhere
    delivery = sender.ship(1)
    ticket = sender.ticket(delivery)
    with connect(ticket, ticket.weight_server.secret) as stuck:
        for _ in range(64):  # 25 MB, which no socket holds
            stuck.sendall(ASK.pack(TAKE, ticket.number))
        assert values(fetch(ticket)) == {1.0}
        gone = weakref.ref(delivery.packed_weights)
        del delivery
        gc.collect()
        assert gone() is not None  # it may still read them
    until(lambda: gone() is None)


def test_who_answers_without_the_key_is_not_believed(sender):
    ticket = sender.ticket(sender.ship(1))
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.listen()
        port = impostor.getsockname()[1]
        executor = SerialExecutor()

        def answer():
            connection, _ = impostor.accept()
            connection.recv(NONCE + PROOF, socket.MSG_WAITALL)
            connection.sendall(bytes(PROOF))
            return connection

        answered = executor.give(answer)
        with pytest.raises(Unreached, match="does not know the secret"):
            fetch(ticket._replace(weight_server=ticket.weight_server._replace(port=port)))
        assert answered.done_by(time.monotonic() + 60)
        answered.result().close()
        executor.close()


def test_a_sender_that_cannot_be_reached_is_told_apart_from_one_that_is_gone(sender):
    delivery = sender.ship(1)
    ticket = sender.ticket(delivery)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(Unreached, match="cannot be reached"):
        fetch(ticket._replace(weight_server=ticket.weight_server._replace(port=port)))
    assert values(fetch(ticket)) == {1.0}
    sender.carrier.close()  # which ends its connections
    gc.collect()
    with pytest.raises((Unreached, WriterDied)):
        fetch(ticket)


def test_a_forked_child_does_not_keep_the_weight_server_of_its_parent(sender):
    address = sender.ship(1).ticket.weight_server
    waits, told = os.pipe()

    def in_child():
        os.close(told)
        os.read(waits, 1)  # until the parent ends the test

    child = forked_child(in_child)
    os.close(waits)
    try:
        sender.carrier.close()
        gc.collect()

        def refuses():
            try:
                socket.create_connection((address.host, address.port)).close()
            except ConnectionRefusedError:
                return True
            return False

        until(refuses)
    finally:
        os.close(told)
        os.waitpid(child, 0)


def test_a_worker_that_has_left_its_node_counts_there_no_more(sender):
    delivery = sender.ship(1)
    delivery = dataclasses.replace(delivery, ticket=delivery.ticket._replace(size=EACH + 1))
    first, second = Destination(), Destination()
    assert not delivery.one_copy_per_node(first, "far")
    assert delivery.one_copy_per_node(second, "far")
    del first
    gc.collect()
    assert not delivery.one_copy_per_node(second, "far")


def test_looking_for_ended_connections_waits_for_none_and_keeps_the_others(sender):
    delivery = sender.ship(1)
    ticket = sender.ticket(delivery)._replace(seconds=3600.0)
    assert values(fetch(ticket)) == {1.0}
    forget_ended()
    forget_ended()
    assert values(fetch(ticket)) == {1.0}


def test_a_task_that_was_carried_out_keeps_nothing_that_it_was_made_of():
    class Call:
        def run(self):
            return 1

    executor, call = SerialExecutor(), Call()
    call.task = executor.give(call.run)  # a circle, as a call of RPC has it
    assert call.task.done_by(time.monotonic() + 60) and call.task.result() == 1
    gone = weakref.ref(call)
    gc.disable()
    try:
        del call
        until(lambda: gone() is None)
    finally:
        gc.enable()
    executor.close()
