"""Pipes: the frames of multiprocessing.Connection, in both directions, without ever blocking."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import subprocess
import time

import pytest

from shmsync.schemes.links import Link
from shmsync.schemes.messages import framed
from shmsync.schemes.pipe import Pipe
from support.calls import Call

SOON = 5.0  # seconds; far more than anything here takes


@pytest.fixture
def pipe():
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def read_all(pipe_end, deadline=SOON):
    end = time.monotonic() + deadline
    while (found := pipe_end.receive()) is None:
        assert time.monotonic() < end
        pipe_end.wait(end)
    return found[0]


def write_all(pipe_end):
    end = time.monotonic() + SOON
    while pipe_end.unsent:
        assert time.monotonic() < end
        pipe_end.wait(end)
        pipe_end.flush()


@pytest.mark.parametrize("size", [0, 10, 16_384, 16_385, 300_000])
def test_a_pipe_and_a_plain_connection_read_what_the_other_one_sends(pipe, size):
    ours, theirs = pipe
    pipe_end = Pipe.of(ours)
    message = os.urandom(size)
    reading = Call(theirs.recv)
    pipe_end.send(framed(pickle.dumps(message)))
    while pipe_end.unsent:
        pipe_end.flush()
    assert reading.result() == message
    writing = Call(theirs.send, message)
    assert read_all(pipe_end) == message
    writing.result()


def test_a_full_pipe_never_blocks_and_keeps_only_the_newest_weights(pipe):
    ours, theirs = pipe
    link = Link.of(ours)
    big = pickle.dumps(b"1" * 3_000_000)
    link.post(framed(big), ("policy", 1))  # has begun to leave, so it stays
    for number in range(2, 6):
        link.post(framed(pickle.dumps(number)), ("policy", number))
        assert list(link.unanswered) == [("policy", 1), ("policy", number)]
    link.post(framed(pickle.dumps("other")), ("value", 1))
    reading = Call(lambda: [theirs.recv() for _ in range(3)])
    write_all(link)
    got = reading.result()
    assert [got[0] == b"1" * 3_000_000, *got[1:]] == [True, 5, "other"]


def test_the_end_of_the_pipe_is_told_after_the_last_message(pipe):
    ours, theirs = pipe
    theirs.send("last")
    theirs.close()
    pipe_end = Pipe.of(ours)
    assert pipe_end.receive() == ("last",) and not pipe_end.ended
    assert pipe_end.receive() is None and pipe_end.ended


def test_only_duplex_pipes_will_do():
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer, pytest.raises(ValueError, match="duplex=True"):
        Pipe.of(reader)
    with pytest.raises(ValueError, match="not over a list"):
        Pipe.of([])


def test_a_default_time_out_of_sockets_leaves_the_pipe_blocking(pipe):
    socket.setdefaulttimeout(5.0)
    try:
        Pipe.of(pipe[0])
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(pipe[0].fileno())


def test_a_link_knows_a_process_that_runs_by_its_pid_or_its_object(pipe):
    child = subprocess.Popen(["sleep", "60"])
    starting = multiprocessing.Process(target=time.sleep, args=(0,))
    try:
        assert Link.of(pipe[0], starting).peer is None  # not started yet
        for process in (child, child.pid):
            assert Link.of(pipe[0], process).peer.pid == child.pid
        with pytest.raises(TypeError, match=r"a subprocess.Popen or a pid, not 'worker'"):
            Link.of(pipe[0], "worker")
        assert Link.of(pipe[0]).peer.pid == child.pid
    finally:
        child.kill()
        child.wait()
