"""Weights of a GPU: what a publish costs beside a bare copy, on the device and to the host, and the way back.

    make bench BENCH=gpu
    make bench BENCH=gpu ARGS="--sections 'the aims'"     less than six minutes
    make bench BENCH=gpu ARGS="--small --sections 'the aims'"     over the tests' device without hardware: no figures

A machine without a GPU that shmsync can use prints why, and ends. A worker in another process looks at all values of
each version. The memory needed is five times the size: the weights, two slots, and two buffers of the floor.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import common
import torch
from common import Row, timed

import shmsync
from shmsync.engine.bind.guard import bind
from shmsync.engine.subscriber import reader_of
from shmsync.memory.cuda import refused

SMALL = "--small" in sys.argv
GPU = "simulated:0" if SMALL else "cuda:0"
SIZES = {"1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << (22 if SMALL else 28), "1 GB": 1 << 30}
MOST = 5 if SMALL else 30  # rounds
AIMS = MOST if SMALL else 12  # rounds of the rows that have an aim


def llama() -> list[int]:
    """Elements of the tensors of an 8B Llama: 32 layers, 8 of 32 heads for keys and values, an embedding, a head."""
    wide, inner, vocabulary = 4096, 14_336, 128_256
    layer = [wide * wide, wide * wide // 4, wide * wide // 4, wide * wide, *[wide * inner] * 3, wide, wide]
    return [vocabulary * wide, *layer * 32, wide, vocabulary * wide]


def mixture() -> list[int]:
    """Elements of the tensors of a mixture of experts like Qwen3-30B-A3B: 48 layers of 128 experts."""
    wide, heads, vocabulary = 2048, 4096, 151_936
    attention = [wide * heads, wide * heads // 8, wide * heads // 8, heads * wide, 128, 128, wide, wide]
    layer = [*attention, wide * 128, *[wide * 768] * 3 * 128]
    return [vocabulary * wide, *layer * 48, wide, vocabulary * wide]


SHAPES: dict[str, Callable[[], list[int]]] = {
    "64 tensors": lambda: [1] * 64, "like an 8B Llama": llama, "like a mixture of experts": mixture,
    "1 tensor": lambda: [1], "4,000 tensors": lambda: [1] * 4000,
}  # fmt: skip
LARGE = ("64 tensors", "like an 8B Llama", "like a mixture of experts")


def weights(nbytes: int, shape: str) -> dict[str, torch.Tensor]:
    """Float32 tensors in the proportions of a model, of about `nbytes` in all, none of them empty."""
    parts = SHAPES[shape]()
    whole, words = sum(parts), nbytes // 4
    return {f"leaf{n}": torch.ones(max(1, words * each // whole), device=GPU) for n, each in enumerate(parts)}


def synchronized(work: Callable[[], object]) -> float:
    """Seconds until the GPU has done it."""
    synchronize()
    return timed(lambda: (work(), synchronize()))


def synchronize() -> None:
    torch.get_device_module(torch.device(GPU)).synchronize()


def pinned(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=not SMALL)


def follow(pipe: Connection, handle: shmsync.Handle, index: int) -> None:
    """A worker: moves to each version, and answers with the time that took its thread and whether it was whole."""
    with shmsync.Subscriber(handle, worker=index, timeout=common.PATIENCE) as sub:
        version = 1
        pipe.send((version, 0.0, True))
        while True:
            version = sub.wait_version(version + 1)
            section = sub.read()
            stall = timed(section.__enter__)
            version = section.version
            right = all(bool((tensor == version).all()) for tensor in section.weights.values())
            section.__exit__(None, None, None)
            pipe.send((version, stall, right))


def arena(size: str, shape: str, workers: int, host: bool = False, aim: str = "") -> Iterator[Row]:
    """publish(wait=[]) beside a copy of as many bytes to the same place; how long trainer and worker stand still.

    `host`: the arena lies in the host's memory, and not on the GPU.
    """
    source = weights(SIZES[size], shape)
    nbytes = sum(tensor.nbytes for tensor in source.values())
    floor_from = torch.empty(nbytes, dtype=torch.uint8, device=GPU)
    floor_to = pinned(nbytes) if host else torch.empty_like(floor_from)
    floor = "a copy to pinned memory" if host else "a copy on the GPU"
    publishes, stands, floors, stalls = [], [], [], []
    where = f"{size}, {shape}, {workers} workers, {'to the host' if host else 'on the GPU'}"
    with (
        shmsync.Publisher(source, slots=2, device="cpu" if host else GPU, timeout=common.PATIENCE) as pub,
        common.crew(follow, [(pub.handle, index) for index in range(workers)]) as crew,
    ):
        crew.answers()
        for number in range(2 * (AIMS if aim else MOST)):
            for tensor in source.values():
                tensor.fill_(pub.version + 1)
            synchronize()
            if number % 2:
                stands.append(timed(pub.publish))
            else:
                publishes.append(synchronized(lambda: pub.publish(wait=[])))
                floors.append(synchronized(lambda: floor_to.copy_(floor_from, non_blocking=True)))
            found = crew.answers()
            assert all(right and version == pub.version for version, _, right in found), f"workers have seen {found}"
            stalls += [stall for _, stall, _ in found]
    most = f"{60 + 0.1 * len(source):.0f} us" if aim else ""
    yield Row(f"publish(wait=[]), {where}", publishes[3:], floor, floors[3:], aim)
    yield Row(f"the trainer stands still in publish(), {where}", stands[3:], aim=most)
    yield Row(f"a worker stands still to move, {where}", stalls[3 * workers :])


def fetch(size: str, shape: str) -> Iterator[Row]:
    """A worker's module on the GPU moves to a version in the host's memory, beside a copy of as many bytes."""
    source = {name: tensor.cpu() for name, tensor in weights(SIZES[size], shape).items()}
    module = torch.nn.ParameterDict({name: tensor.to(GPU) for name, tensor in source.items()}).requires_grad_(False)
    nbytes = sum(tensor.nbytes for tensor in source.values())
    floor_to, floor_from = torch.empty(nbytes, dtype=torch.uint8, device=GPU), pinned(nbytes)
    moves, floors = [], []
    with (
        shmsync.Publisher(source, slots=2, device="cpu", timeout=common.PATIENCE) as pub,
        shmsync.Subscriber(pub.handle, timeout=common.PATIENCE) as sub,
    ):
        bind(reader_of(sub), module, [], copies=True)
        for _ in range(AIMS):
            for tensor in source.values():
                tensor.fill_(pub.version + 1)
            pub.publish()
            moves.append(synchronized(sub.refresh))
            floors.append(synchronized(lambda: floor_to.copy_(floor_from, non_blocking=True)))
            assert all(bool((tensor == pub.version).all()) for tensor in module.values())
    what = f"refresh() of a module on the GPU, {size}, {shape}, from the host"
    yield Row(what, moves[3:] or moves, "a copy from pinned memory", floors[3:] or floors, "1.11 x")


def update(size: str) -> Iterator[Row]:
    with shmsync.Publisher(weights(SIZES[size], "64 tensors"), device=GPU, timeout=common.PATIENCE) as pub:

        def one() -> None:
            with pub.update(wait=[]) as inside:
                inside["leaf0"][:1].add_(1)

        yield Row(f"update() of one value, {size}", [synchronized(one) for _ in range(MOST)][3:])


def pickled(size: str) -> Iterator[Row]:
    """The weights through the host, as a queue would send them."""
    source = weights(SIZES[size], "64 tensors")

    def through() -> None:
        data = pickle.dumps({name: tensor.cpu() for name, tensor in source.items()})
        for tensor in pickle.loads(data).values():
            tensor.to(GPU)

    yield Row(f"by pickle and the host, {size}", [], "here", [synchronized(through) for _ in range(6)][1:])


def hold(pipe: Connection) -> None:
    """A worker with one CUDA handle of torch.multiprocessing for each tensor."""
    tensors: dict[str, Any] = pipe.recv()
    pipe.send(len(tensors))
    while pipe.recv():
        pipe.send(sum(float(tensor[0]) for tensor in tensors.values()))


def handles(size: str) -> Iterator[Row]:
    source = weights(SIZES[size], "64 tensors")
    with common.crew(hold, [()]) as crew:
        opened = timed(lambda: crew.ask(source))
        spent = [timed(lambda: (synchronize(), crew.ask("new"))) for _ in range(MOST)]
        yield Row(f"torch.multiprocessing, handles of 64 tensors, {size}", [], "opened once", [opened])
        yield Row(f"torch.multiprocessing, one message, {size}", [], "here", spent)


SECTIONS = {
    "the aims": [
        *[partial(arena, "256 MB", shape, 1, host=True, aim="1.11 x")
          for shape in ("1 tensor", "64 tensors", "like an 8B Llama", "4,000 tensors")],
        *[partial(arena, "256 MB", shape, 1, aim=aim)
          for shape, aim in zip(LARGE, ("1.3 x", "2 x", "4 x"), strict=True)],
        *[partial(fetch, "256 MB", shape) for shape in ("1 tensor", "64 tensors", "like an 8B Llama", "4,000 tensors")],
    ]
} | {
    size: [
        *[partial(arena, size, shape, 1) for shape in (LARGE if nbytes >= 1 << 28 else LARGE[:1])],
        partial(arena, size, "64 tensors", 4),
        partial(update, size),
        *([partial(pickled, size), partial(handles, size)] if nbytes <= 1 << 28 else []),
    ]
    for size, nbytes in SIZES.items()
}  # fmt: skip

if __name__ == "__main__":
    common.CONTEXT = multiprocessing.get_context("spawn")  # a forked child may not use CUDA
    if not SMALL and (why := refused()) is not None:
        print(f"skipped: {why}")
    else:
        print(GPU if SMALL else torch.cuda.get_device_name(0))
        arguments, rows = common.main(__doc__, SECTIONS, "--small")
        common.end(arguments)
