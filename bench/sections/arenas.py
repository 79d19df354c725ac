"""What one more arena costs, as in a league with one for each opponent: time to make, to attach, descriptors."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing.connection
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from common.clock import Clock
from common.measure import CONTEXT, percentiles, processes, timed
from common.row import NO_BYTES, OK, Row, times

import shmsync

ARENAS = 20
SIZE = 2 << 20  # bytes of weights of each


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def memfd(source: bytes) -> tuple[int, mmap.mmap]:
    """What an arena cannot do without."""
    fd = os.memfd_create("bench", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, SIZE)
    mapping = mmap.mmap(fd, SIZE)
    mapping[:] = source
    return fd, mapping


def attach(handles: list[shmsync.Handle], paths: list[str], pipe: multiprocessing.connection.Connection) -> None:
    shmsync.Subscriber(handles[0]).close()  # the first of a process looks up what the process is
    before, subs, maps = descriptors(), [], []
    ours, floor = [], []
    for handle, path in zip(handles, paths, strict=True):
        ours.append(timed(lambda: subs.append(shmsync.Subscriber(handle))))  # noqa: B023

        def by_hand() -> None:
            fd = os.open(path, os.O_RDONLY)  # noqa: B023
            maps.append(mmap.mmap(fd, SIZE, prot=mmap.PROT_READ))
            os.close(fd)

        floor.append(timed(by_hand))
    maps.clear()  # each keeps a descriptor
    kept = descriptors() - before
    sums = [int(sub.weights["w"].sum()) for sub in subs]
    for sub in subs:
        sub.close()
    pipe.send((ours, floor, kept, sums))


def rows(clock: Clock) -> Iterator[Row]:
    making: tuple[list[float], list[float]] = ([], [])
    attaching: tuple[list[float], list[float]] = ([], [])
    wrong = ""
    taken, kept = 0, 0
    for turn in range(20):
        if turn >= 2 and clock.left < 0.5:
            break
        with contextlib.ExitStack() as stack:
            pubs: list[Any] = []
            files: list[tuple[int, mmap.mmap]] = []
            before, by_hand = descriptors(), 0
            for number in range(ARENAS):
                source = torch.full((SIZE,), number % 7, dtype=torch.uint8)
                content = source.numpy().tobytes()
                start = time.perf_counter()
                pubs.append(stack.enter_context(shmsync.Publisher({"w": source}, slots=1)))
                making[0].append(time.perf_counter() - start)
                making[1].append(timed(lambda: files.append(memfd(content))))  # noqa: B023
                stack.callback(os.close, files[-1][0])
                by_hand += 2  # mmap keeps one
            taken = descriptors() - before - by_hand
            mine, theirs = CONTEXT.Pipe(duplex=False)
            paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd, _ in files]
            with processes(attach, [([pub.handle for pub in pubs], paths, theirs)]):
                ours, floor, kept, sums = mine.recv()
            attaching[0].extend(ours), attaching[1].extend(floor)
            if sums != [SIZE * (number % 7) for number in range(ARENAS)]:
                wrong = f"WRONG: a worker summed {sums}"
    check = wrong or OK
    what = f"of {SIZE >> 20} MB, {ARENAS} in a process"
    yield Row(f"making an arena {what}", times(percentiles(making[0])),
              "a memfd, allocated, mapped, filled", times(percentiles(making[1])), "5 ms", check)  # fmt: skip
    yield Row(f"attaching to an arena {what}", times(percentiles(attaching[0])),
              "opening and mapping that memfd", times(percentiles(attaching[1])), "3 ms", check)  # fmt: skip
    yield Row(f"descriptors of a trainer for {ARENAS} arenas", (taken, taken),
              "memfds", (ARENAS, ARENAS), "1 x", NO_BYTES, unit="")  # fmt: skip
    yield Row(f"descriptors of a worker attached to {ARENAS}", (kept, kept), check=NO_BYTES, unit="")
