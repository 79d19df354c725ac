"""A trainer and workers on the simulated device, each with its own stream, without pause.

Every number of a version is its number; kernels look at them when they run, which is after their section.
A reader looks at a version once or more, and then waits for the next: readers that never wait take the trainer's
processor for looks at the same version.
"""

from __future__ import annotations

import math
import os
import random
import threading
from contextlib import contextmanager
from typing import NamedTuple

import torch

import shmsync
from support.devices.simulated import Simulated, everywhere
from support.worker import fork_server

WORDS = 64
TIMEOUT = 120.0


class Counted(NamedTuple):
    """What a storm has seen."""

    publishes: int
    reads: int
    wrong: int  # reads that saw something else than their section's version


def publish_all(device: Simulated, pub: shmsync.Publisher, there: torch.Tensor, last: int, seed: int) -> None:
    """Publish up to this version: from the device's memory, from the host's and in place, by turns of a seed."""
    halves = there[: WORDS // 2], there[WORDS // 2 :]
    chance, host = random.Random(seed), torch.empty(WORDS)

    def fill(parts, value):
        for part in parts:
            device.kernel(lambda part=part: part.fill_(value))

    with device.on(device.stream()):
        for version in range(2, last):
            how = chance.random()
            if how < 0.2:
                with pub.update() as weights:
                    there_now = weights["t"]
                    fill((there_now[: WORDS // 2], there_now[WORDS // 2 :]), version)
            elif how < 0.3:
                pub.publish({"t": host.fill_(version)})
                host.fill_(-version)
            else:
                fill(halves, version)
                pub.publish({"t": there})
                fill(halves, -version)  # the next step of the trainer
        pub.publish({"t": host.fill_(last)}, wait=[])


def read_all(device: Simulated, handle, number: int, last: int, seed: int) -> tuple[int, int]:
    """Ask for kernels in sections until they show the version `last`; how many looked, and how many saw another."""
    seen, chance, kernels = [0, 0], random.Random(seed), device.stream()

    def look(weights, version):
        seen[0] += 1
        seen[1] += not bool((weights == version).all())

    version = 0
    with shmsync.Subscriber(handle, worker=number, timeout=TIMEOUT) as sub:
        while version < last:
            with device.on(kernels), sub.read() as section:
                weights, version = section.weights["t"], section.version
                device.kernel(lambda weights=weights, version=version: look(weights, version))
            if version < last and chance.random() < 0.5:
                sub.wait_version(version + 1)
        while not device.wait(kernels, 1.0):
            device.check()
    return seen[0], seen[1]


def storm(device: Simulated, publishes: int, *, slots: int, readers: int = 3, seed: int = 0) -> Counted:
    """A storm whose readers are threads."""

    def start(pub, last):
        counts: list[tuple[int, int]] = []
        threads = [
            threading.Thread(
                target=lambda number=number: counts.append(read_all(device, pub.handle, number, last, seed + number))
            )
            for number in range(readers)
        ]
        for thread in threads:
            thread.start()

        def finish():
            for thread in threads:
                thread.join()
            return counts

        return finish

    return _storm(device, publishes, slots, seed, readers, start)


def storm_of_processes(device: Simulated, publishes: int, *, slots: int, readers: int, seed: int) -> Counted:
    """A storm whose readers are processes, with a device of their own over the same memory."""
    context = fork_server()

    def start(pub, last):
        results = context.SimpleQueue()
        arguments = pub.handle, last, seed, device.longest, results
        processes = [context.Process(target=_read_apart, args=(number, *arguments)) for number in range(readers)]
        for process in processes:
            process.start()
        pub.wait_readers(range(readers), procs=processes, timeout=math.inf)

        def finish():
            for process in processes:
                process.join()
            return [results.get() for process in processes if process.exitcode == 0]

        return finish

    return _storm(device, publishes, slots, seed, readers, start)


def _storm(device, publishes, slots, seed, readers, start):
    there, last = device.tensor(torch.full((WORDS,), 1.0)), publishes + 2
    with shmsync.Publisher({"t": there}, slots=slots, timeout=TIMEOUT) as pub:
        finish = start(pub, last)
        try:
            publish_all(device, pub, there, last, seed)
        except BaseException:
            pub.close()  # so that readers end
            raise
        finally:
            counts = finish()
    if len(counts) != readers:
        raise AssertionError(f"{readers - len(counts)} of {readers} readers did not end well")
    return Counted(publishes + 1, *(sum(each) for each in zip(*counts, strict=True)))


@contextmanager
def _alone(seed, longest):
    """The simulated device of a separate process."""
    torch.set_num_threads(1)
    with everywhere(seed, longest) as device:
        yield device


def _read_apart(number, handle, last, seed, longest, results):
    with _alone(seed + os.getpid(), longest) as device:
        results.put(read_all(device, handle, number, last, seed + number))
