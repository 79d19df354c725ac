"""Channels: the frames of multiprocessing.Connection, in both directions, without ever blocking."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import struct
import threading
import time

import pytest

from shmsync import _native
from shmsync.schemes.pipes import connection as _channel
from shmsync.schemes.pipes.connection import Channel
from shmsync.schemes.pipes.messages import Tag

SOON = 5.0  # seconds; far more than anything here takes


@pytest.fixture
def pipe():
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def read_all(channel, deadline=SOON):
    end = time.monotonic() + deadline
    while (found := channel.read()) is None:
        assert time.monotonic() < end
        channel.wait(end)
    return found[0]


@pytest.mark.parametrize("size", [0, 10, 16_384, 16_385, 300_000])
def test_a_plain_connection_reads_what_a_channel_sends(pipe, size):
    ours, theirs = pipe
    channel = Channel.of(ours)
    message = os.urandom(size)
    reader = threading.Thread(target=lambda: got.append(theirs.recv()))
    got: list[bytes] = []
    reader.start()
    channel.queue(multiprocessing.reduction.ForkingPickler.dumps(message))
    while channel.unsent:
        channel.flush()
    reader.join()
    assert got == [message]


@pytest.mark.parametrize("size", [0, 10, 16_384, 16_385, 300_000])
def test_a_channel_reads_what_a_plain_connection_sends(pipe, size):
    ours, theirs = pipe
    message = os.urandom(size)
    writer = threading.Thread(target=theirs.send, args=(message,))
    writer.start()
    assert read_all(Channel.of(ours)) == message
    writer.join()


def test_frames_of_more_than_two_gigabytes_have_a_long_header(pipe, monkeypatch):
    monkeypatch.setattr(_channel, "_LONG", 100)  # the same header, for less
    ours, theirs = pipe
    Channel.of(ours).queue(b"x" * 101)
    raw = socket.socket(fileno=os.dup(theirs.fileno()))
    with raw:
        assert raw.recv(12, socket.MSG_PEEK) == struct.pack("!iQ", -1, 101)
    assert theirs.recv_bytes() == b"x" * 101  # Connection knows it
    raw = socket.socket(fileno=os.dup(theirs.fileno()))
    with raw:
        payload = multiprocessing.reduction.ForkingPickler.dumps("far")
        raw.sendall(struct.pack("!iQ", -1, len(payload)) + bytes(payload))
    assert read_all(Channel.of(ours)) == "far"


def test_half_a_message_is_kept_until_the_rest_is_there(pipe):
    ours, theirs = pipe
    payload = bytes(multiprocessing.reduction.ForkingPickler.dumps("whole"))
    frame = struct.pack("!i", len(payload)) + payload
    channel = Channel.of(ours)
    for i in range(len(frame)):
        assert channel.read() is None
        assert channel.take_small() is None
        os.write(theirs.fileno(), frame[i : i + 1])
    assert channel.read() == ("whole",)
    assert channel.idle


def test_a_full_pipe_never_blocks_and_keeps_only_the_newest_weights(pipe):
    ours, theirs = pipe
    channel = Channel.of(ours)
    big = multiprocessing.reduction.ForkingPickler.dumps(b"1" * 3_000_000)
    assert channel.queue(big, Tag("policy", 1)) == []  # has begun to leave, so it stays
    for number in range(2, 6):
        replaced = channel.queue(multiprocessing.reduction.ForkingPickler.dumps(number), Tag("policy", number))
        assert replaced == ([] if number == 2 else [Tag("policy", number - 1)])
    channel.queue(multiprocessing.reduction.ForkingPickler.dumps("other"), Tag("value", 1))
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.extend(theirs.recv() for _ in range(3)))
    reader.start()
    end = time.monotonic() + SOON
    while channel.unsent:
        assert time.monotonic() < end
        channel.wait(end)
    reader.join()
    assert [got[0] == b"1" * 3_000_000, *got[1:]] == [True, 5, "other"]


def test_the_end_of_the_pipe_is_told_after_the_last_message(pipe):
    ours, theirs = pipe
    theirs.send("last")
    theirs.close()
    channel = Channel.of(ours)
    assert channel.read() == ("last",)
    with pytest.raises(EOFError):
        channel.read()
    assert channel.ended


def test_a_channel_never_reads_beyond_a_message(pipe):
    ours, theirs = pipe
    for message in ("first", "second", "third"):
        theirs.send(message)
    channel = Channel.of(ours)
    assert channel.read() == ("first",)
    assert channel.take_small() is not None
    assert ours.recv() == "third"


def test_a_connection_has_one_channel_and_outlives_no_descriptor(pipe):
    ours, _ = pipe
    assert Channel.of(ours) is Channel.of(ours)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        one, other = multiprocessing.Pipe()
        Channel.of(one).queue(b"x")
        one.close()
        assert Channel.of(other).closed is False
        del one, other
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_interrupt_in_the_middle_of_a_message_ends_the_pipe(pipe):
    ours, _ = pipe
    channel = Channel.of(ours)

    class Interrupted(socket.socket):
        def send(self, *args):  # a handler that raises after the system call
            super().send(*args)
            raise KeyboardInterrupt

    channel._socket.detach()
    channel._socket = Interrupted(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=ours.fileno())
    with pytest.raises(KeyboardInterrupt):
        channel.queue(b"x" * 100)
    channel.flush()
    assert channel.ended and not channel.unsent  # rather than sending a part twice
    channel._socket.detach()


def test_the_default_timeout_of_sockets_changes_no_pipe(pipe):
    ours, _ = pipe
    socket.setdefaulttimeout(5)
    try:
        Channel.of(ours)
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(ours.fileno())


def test_only_duplex_pipes_will_do():
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer, pytest.raises(ValueError, match="duplex=True"):
        Channel.of(reader)
    with pytest.raises(ValueError, match="not over a list"):
        Channel.of([])


def test_exchange_takes_exactly_the_expected_answers_and_leaves_the_rest():
    pipes = [multiprocessing.Pipe() for _ in range(4)]
    try:
        pipes[0][1].send_bytes(b"yes")
        pipes[1][1].send_bytes(b"yes")
        pipes[1][1].send_bytes(b"mine")
        fds = [ours.fileno() for ours, _ in pipes[:2]]
        assert _native.exchange_frames(fds, [], b"go", b"yes", 10**9) == ([], [0, 1])
        assert pipes[1][0].recv_bytes() == b"mine"
        pipes[2][1].send_bytes(b"nope")
        assert _native.exchange_frames([pipes[2][0].fileno()], [], b"go", b"yes", 10**9) == ([], [])
        assert pipes[2][0].recv_bytes() == b"nope"
        died, process = os.pipe()
        os.close(process)
        started = time.monotonic()
        assert _native.exchange_frames([pipes[3][0].fileno()], [died], b"go", b"yes", 10**11) == ([], [])
        assert time.monotonic() - started < SOON
        os.close(died)
        assert [theirs.recv_bytes() for _, theirs in pipes] == [b"go"] * 4
    finally:
        for ours, theirs in pipes:
            ours.close()
            theirs.close()


def test_sending_says_what_did_not_leave(pipe):
    ours, theirs = pipe
    sent = 0
    while not (left := _native.send_frame([ours.fileno()], b"x" * 50_000)):
        sent += 1
    ((position, taken),) = left
    assert position == 0 and 0 <= taken < 50_004 and sent > 0
    theirs.close()
    assert _native.send_frame([ours.fileno()], b"x") == [(0, -1)]
