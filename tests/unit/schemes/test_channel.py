"""Channels: the frames of multiprocessing.Connection, in both directions, without ever blocking."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time

import pytest

from shmsync import _native
from shmsync.schemes.link.connection import Channel
from shmsync.schemes.link.gather import LinkPoll
from shmsync.schemes.link.messages import Tag
from shmsync.schemes.link.sender_end import Link
from support.calls import Call

SOON = 5.0  # seconds; far more than anything here takes


@pytest.fixture
def pipe():
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def read(channel):
    """The next message, if one is there."""
    found = channel.peek()
    if found is not None:
        del channel.arrived[0]
    return found


def read_all(channel, deadline=SOON):
    end = time.monotonic() + deadline
    while (found := read(channel)) is None:
        assert time.monotonic() < end
        channel.wait(end)
    return found[0]


def write_all(channel):
    end = time.monotonic() + SOON
    while channel.unsent:
        assert time.monotonic() < end
        channel.wait(end)


@pytest.mark.parametrize("size", [0, 10, 16_384, 16_385, 300_000])
def test_a_channel_and_a_plain_connection_read_what_the_other_one_sends(pipe, size):
    ours, theirs = pipe
    channel = Channel.of(ours)
    message = os.urandom(size)
    reading = Call(theirs.recv)
    channel.send(pickle.dumps(message))
    while channel.unsent:
        channel.flush()
    assert reading.result() == message
    writing = Call(theirs.send, message)
    assert read_all(channel) == message
    writing.result()


def test_a_full_pipe_never_blocks_and_keeps_only_the_newest_weights(pipe):
    ours, theirs = pipe
    channel = Channel.of(ours)
    big = pickle.dumps(b"1" * 3_000_000)
    awaited = {}
    channel.frames.send(big, "policy", Tag("policy", 1), awaited)  # has begun to leave, so it stays
    for number in range(2, 6):
        channel.frames.send(pickle.dumps(number), "policy", Tag("policy", number), awaited)
        assert awaited == {Tag("policy", 1): True, Tag("policy", number): True}
    channel.frames.send(pickle.dumps("other"), "value", Tag("value", 1), awaited)
    reading = Call(lambda: [theirs.recv() for _ in range(3)])
    write_all(channel)
    got = reading.result()
    assert [got[0] == b"1" * 3_000_000, *got[1:]] == [True, 5, "other"]


def test_the_end_of_the_pipe_is_told_after_the_last_message(pipe):
    ours, theirs = pipe
    theirs.send("last")
    theirs.close()
    channel = Channel.of(ours)
    assert read(channel) == ("last",)
    with pytest.raises(EOFError):
        read(channel)
    assert channel.ended


def test_only_duplex_pipes_will_do():
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer, pytest.raises(ValueError, match="duplex=True"):
        Channel.of(reader)
    with pytest.raises(ValueError, match="not over a list"):
        Channel.of([])


def exchange(connections, watched, timeout_ns):
    ends = [_native.Frames(connection.fileno()) for connection in connections]
    awaited = [{} for _ in ends]
    done = _native.exchange(ends, awaited, watched, b"go", "", 1, b"yes", timeout_ns)
    assert awaited == [{} if position in done else {1: True} for position in range(len(ends))]
    return done


def test_exchange_takes_exactly_the_expected_answers_and_leaves_the_rest():
    pipes = [multiprocessing.Pipe() for _ in range(4)]
    try:
        pipes[0][1].send_bytes(b"yes")
        pipes[1][1].send_bytes(b"yes")
        pipes[1][1].send_bytes(b"mine")
        assert exchange([ours for ours, _ in pipes[:2]], [], 10**9) == [0, 1]
        assert pipes[1][0].recv_bytes() == b"mine"
        pipes[2][1].send_bytes(b"nope")
        assert exchange([pipes[2][0]], [], 10**9) == []
        assert pipes[2][0].recv_bytes() == b"nope"
        died, process = os.pipe()
        os.close(process)
        started = time.monotonic()
        assert exchange([pipes[3][0]], [died], 10**11) == []
        assert time.monotonic() - started < SOON
        os.close(died)
        assert [theirs.recv_bytes() for _, theirs in pipes] == [b"go"] * 4
    finally:
        for ours, theirs in pipes:
            ours.close()
            theirs.close()


def test_a_poll_of_links_finds_readable_pipes_and_processes_that_have_ended(pipe):
    ours, theirs = pipe
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    link = Link(ours, process)
    watch = LinkPoll({7: link})
    assert watch.wait([7], time.monotonic()) == [(7, False)]  # no event: each worker may be looked at
    theirs.send("news")
    assert watch.wait([7], time.monotonic() + SOON) == [(7, True)]
    assert link.take_pending() == ["news"]
    process.kill()
    process.join()
    assert watch.wait([], time.monotonic() + SOON) == [(7, False)]
    assert link.dead
