"""publish(wait="all") beside ping-pongs over pipes, and update() with readers asleep beside the bare futex call."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing.connection
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from common.clock import Clock, Job
from common.measure import CONTEXT, processes, rounds, row, timed
from common.row import NO_BYTES, Row

import shmsync

LIBC = ctypes.CDLL(None)
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
FUTEX_WAIT, FUTEX_WAKE = 0, 1


def rows(clock: Clock) -> Iterator[Row]:
    jobs = []
    for readers in (4, 1, 2, 8):
        small = partial(ack_row, readers, 1, 1, "4 bytes", "one-byte ping-pong", "0.8 x")
        jobs.append(Job(small, 1, f'publish(wait="all") 4 bytes, {readers} readers'))
    jobs.append(Job(sleeper_rows, 2, "update() with readers asleep in wait_version", cost=1))
    for readers in (4, 1, 2, 8):
        large = partial(ack_row, readers, 12_500, 50_000, "50 KB", "ping-pong of 50 KB", "0.7 x")
        jobs.append(Job(large, 1, f'publish(wait="all") 50 KB, {readers} readers'))
    return clock.rows(jobs)


def reader(handle: shmsync.Handle, worker: int, applies: bool) -> None:
    """Move to each version until the publisher is closed; `applies`: and check the values of the last."""
    with shmsync.Subscriber(handle, worker=worker, timeout=60) as sub:
        try:
            while True:
                sub.wait_version(sub.version + 1)
                sub.refresh()
        except shmsync.ClosedError:
            assert not applies or sub.weights["t"].eq(float(sub.latest)).all(), "checksum"


@contextmanager
def applying_readers(source: dict[str, torch.Tensor], count: int) -> Iterator[shmsync.Publisher]:
    """A publisher whose readers apply each version. After its end they check the values of the last."""
    with (
        shmsync.Publisher(source, timeout=60) as pub,
        processes(reader, [(pub.handle, index, True) for index in range(count)]) as workers,
    ):
        pub.wait_readers(list(range(count)), procs=workers)
        yield pub
        pub.close()  # ends the readers


def pipe_peer(pipe: multiprocessing.connection.Connection) -> None:
    while pipe.recv_bytes():
        pipe.send_bytes(b"ack")


def ack_row(readers: int, elements: int, message: int, size: str, floor_name: str, aim: str) -> Iterator[Row]:
    source = {"t": torch.full((elements,), 1.0)}
    pipes = [CONTEXT.Pipe() for _ in range(readers)]
    payload = bytes(message)
    ours, floor = [], []

    def ping_pong() -> None:
        for pipe, _ in pipes:
            pipe.send_bytes(payload)
        for pipe, _ in pipes:
            pipe.recv_bytes()

    with processes(pipe_peer, [(theirs,) for _, theirs in pipes]):
        with applying_readers(source, readers) as pub:
            for number in rounds(300, fewest=20):
                source["t"].fill_(number + 2)
                ours.append(timed(lambda: pub.publish(wait="all")))
                floor.append(timed(ping_pong))
        for pipe, _ in pipes:
            pipe.send_bytes(b"")
    yield row(f'publish(wait="all") {size}, {readers} readers / {floor_name}', ours, floor, aim)


def raw_sleeper(words: mmap.mmap, me: int, last: int) -> None:
    words_32 = (ctypes.c_uint32 * 64).from_buffer(words)
    seen = 0
    while seen < last:
        LIBC.syscall(SYS_FUTEX, words_32, FUTEX_WAIT, ctypes.c_uint32(seen), None, None, 0)
        seen = words_32[0]
        words_32[32 + me] = seen


def raw_wakes(readers: int, wakes: int) -> list[float]:
    """The floor under waking sleepers: one futex call on a shared word, nothing else."""
    words = mmap.mmap(-1, 4096)  # shared with forked children
    words_32 = (ctypes.c_uint32 * 64).from_buffer(words)
    samples = []
    with processes(raw_sleeper, [(words, index, wakes) for index in range(readers)]):
        time.sleep(0.2)
        for number in range(1, wakes + 1):
            start = time.perf_counter()
            words_32[0] = number
            LIBC.syscall(SYS_FUTEX, words_32, FUTEX_WAKE, ctypes.c_uint32(1 << 30), None, None, 0)
            samples.append(time.perf_counter() - start)
            while any(words_32[32 + i] < number for i in range(readers)):
                time.sleep(0.0005)
    return samples


def sleeper_rows() -> Iterator[Row]:
    for readers in (1, 4):
        samples = []
        with (
            shmsync.Publisher({"t": torch.zeros(1000)}, timeout=60) as pub,
            processes(reader, [(pub.handle, index, False) for index in range(readers)]),
        ):
            while len(pub.readers()) < readers:
                time.sleep(0.01)
            for _ in rounds(300, fewest=20):
                start = time.perf_counter()
                with pub.update():
                    pass
                samples.append(time.perf_counter() - start)
                while any(each.lag or each.pinned for each in pub.readers()):
                    time.sleep(0.0005)
            pub.close()  # ends the readers
        floor, aim = raw_wakes(readers, len(samples)), f"{15 + 6 * readers} us"
        yield row(f"update() with {readers} asleep in wait_version / futex wake", samples, floor, aim, NO_BYTES)
