"""publish(wait="all") against a pipe ping-pong, and update() with workers asleep against the bare futex call."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing.connection
import platform
import time

import torch
from measure import CONTEXT, report, rounds, timed

import shmsync

LIBC = ctypes.CDLL(None)
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
FUTEX_WAIT, FUTEX_WAKE = 0, 1


def waiting_reader(handle: shmsync.Handle) -> None:
    """Until the publisher is closed."""
    with shmsync.Subscriber(handle, timeout=60) as sub:
        try:
            while True:
                sub.wait_version(sub.version + 1)
                sub.refresh()
        except shmsync.ClosedError:
            pass


def applying_reader(handle: shmsync.Handle, worker: int) -> None:
    with shmsync.Subscriber(handle, worker=worker, timeout=60) as sub:
        try:
            while True:
                sub.wait_version(sub.version + 1)
                sub.refresh()
        except shmsync.ClosedError:
            assert sub.weights["t"].eq(float(sub.latest)).all(), "checksum"


def pipe_peer(pipe: multiprocessing.connection.Connection) -> None:
    while pipe.recv_bytes():
        pipe.send_bytes(b"ack")


def ack_rows() -> None:
    for readers in (1, 2, 4, 8):
        ack_row(readers, 12_500, 50_000, "50 KB", "pipe ping-pong", "0.7 x")
    for readers in (1, 2, 4, 8):
        ack_row(readers, 1, 1, "4 bytes", "one-byte ping-pong", "0.8 x")


def ack_row(readers: int, elements: int, message: int, size: str, floor_name: str, limit: str) -> None:
    source = {"t": torch.full((elements,), 1.0)}
    pipes = [CONTEXT.Pipe() for _ in range(readers)]
    peers = [CONTEXT.Process(target=pipe_peer, args=(theirs,)) for _, theirs in pipes]
    payload = bytes(message)
    ours, floor = [], []

    def ping_pong() -> None:
        for pipe, _ in pipes:
            pipe.send_bytes(payload)
        for pipe, _ in pipes:
            pipe.recv_bytes()

    with shmsync.Publisher(source, timeout=60) as pub:
        workers = [CONTEXT.Process(target=applying_reader, args=(pub.handle, i)) for i in range(readers)]
        for process in (*workers, *peers):
            process.start()
        pub.wait_readers(list(range(readers)), procs=workers)
        for number in rounds(300, fewest=20):
            source["t"].fill_(number + 2)
            ours.append(timed(lambda: pub.publish(wait="all")))
            floor.append(timed(ping_pong))
    for pipe, _ in pipes:
        pipe.send_bytes(b"")
    for process in (*workers, *peers):
        process.join()
        assert process.exitcode == 0, "checksum"
    report(f'publish(wait="all") {size}, {readers} readers / {floor_name}', ours, floor, limit)


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
    sleepers = [CONTEXT.Process(target=raw_sleeper, args=(words, i, wakes)) for i in range(readers)]
    for process in sleepers:
        process.start()
    time.sleep(0.2)
    samples = []
    for number in range(1, wakes + 1):
        start = time.perf_counter()
        words_32[0] = number
        LIBC.syscall(SYS_FUTEX, words_32, FUTEX_WAKE, ctypes.c_uint32(1 << 30), None, None, 0)
        samples.append(time.perf_counter() - start)
        while any(words_32[32 + i] < number for i in range(readers)):
            time.sleep(0.0005)
    for process in sleepers:
        process.join()
    return samples


def sleeper_rows() -> None:
    for readers in (1, 4):
        with shmsync.Publisher({"t": torch.zeros(1000)}, timeout=60) as pub:
            workers = [CONTEXT.Process(target=waiting_reader, args=(pub.handle,)) for _ in range(readers)]
            for process in workers:
                process.start()
            while len(pub.readers()) < readers:
                time.sleep(0.01)
            samples = []
            for _ in rounds(300, fewest=20):
                start = time.perf_counter()
                with pub.update():
                    pass
                samples.append(time.perf_counter() - start)
                while any(reader.lag or reader.pinned for reader in pub.readers()):
                    time.sleep(0.0005)
        for process in workers:
            process.join()
            assert process.exitcode == 0
        floor = raw_wakes(readers, len(samples))
        report(f"update() with {readers} asleep in wait_version / futex wake", samples, floor, f"{15 + 6 * readers} us")
