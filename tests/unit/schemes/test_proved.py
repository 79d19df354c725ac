"""Connections whose ends prove that they know a secret: who gets one, who does not, and what a fork leaves of them."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket

import pytest

from shmsync.schemes.link import proved
from shmsync.schemes.link.proved import NONCE, PROOF, Dial, Listener, connection_of, proof
from support.processes import until

HOST = "127.0.0.1"
SECRET = secrets.token_bytes(PROOF)


@pytest.fixture
def listener():
    made = Listener(HOST, SECRET)
    yield made
    made.close()


def dial(listener, secret=SECRET):
    return Dial(HOST, listener.port, secret)


def admit(listener):
    poller = select.poll()
    listener.register(poller)
    return listener.admit(dict(poller.poll(0)))


def connect(listener):
    """Both ends of a new connection: the dialler's, the listener's."""
    made, theirs, ours = dial(listener), [], []

    def both():
        theirs.extend(admit(listener))
        ours.extend(each for each in [None if ours else made.advance()] if each is not None)
        return ours and theirs

    until(both)
    for each in (ours[0], theirs[0]):
        each.setblocking(True)
    return connection_of(ours[0]), connection_of(theirs[0])


def stranger(listener, *sent):
    """A connection that sends this and proves nothing."""
    made = socket.create_connection((HOST, listener.port))
    for each in sent:
        made.sendall(each)
    return made


def until_ended(listener, connection):
    """The listener has closed it, without a word."""
    until(lambda: admit(listener) or select.select([connection], [], [], 0)[0])
    with contextlib.suppress(ConnectionResetError):  # where something was not read
        assert connection.recv(1) == b""


def test_a_dialler_that_does_not_know_the_secret_gets_none(listener):
    made = dial(listener, bytes(PROOF))
    admitted = []

    def refused():
        admitted.extend(admit(listener))
        try:
            return made.advance() is not None
        except ConnectionRefusedError:
            raise
        except OSError:
            return True

    until(refused)
    assert admitted == []


def test_a_listener_that_does_not_know_the_secret_gets_no_message():
    other = socket.create_server((HOST, 0))
    made = Dial(HOST, other.getsockname()[1], SECRET)
    assert made.advance() is None
    accepted, _ = other.accept()
    with pytest.raises(ConnectionAbortedError, match="does not know the secret"):
        until(lambda: made.advance() or accepted.sendall(bytes(PROOF)) or False)
    assert len(accepted.recv(4096)) == NONCE + PROOF  # and nothing else was sent
    accepted.close()
    other.close()


def test_a_hello_that_was_read_on_the_way_opens_no_second_connection(listener):
    nonce = secrets.token_bytes(NONCE)
    hello = nonce + proof(SECRET, b"dialler", nonce)
    first, admitted = stranger(listener, hello), []
    until(lambda: admitted.extend(admit(listener)) or admitted)
    second = stranger(listener, hello)
    until_ended(listener, second)
    for each in (first, second, *admitted):
        each.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(NONCE + PROOF), b"\x80\x05]." * 64])
def test_a_stranger_is_disconnected(listener, sent, monkeypatch):
    monkeypatch.setattr(proved, "_PATIENCE", 0.05)
    connection = stranger(listener, sent)
    until_ended(listener, connection)
    connection.close()
