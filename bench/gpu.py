"""Weights on a GPU: what a publish costs, against a bare copy on the device and against other ways to share.

    make bench BENCH=gpu                      gpu.md and gpu.json in bench-results
    make bench BENCH=gpu ARGS=--dry-run      what it would do; needs no GPU
    make bench BENCH=gpu ARGS="--largest 256MB --workers 1,2"

Rows, for each size and number of workers, with 64 equal tensors. From 256 MB on, also for one worker with tensors in
the number and proportions of an 8B Llama (291) and of a mixture of experts (18,867):
    publish       publish(wait=[]) of weights on the GPU, beside a copy of as many bytes on the GPU (the floor)
    trainer       how long the trainer's thread stands still in publish(); the copy goes on behind it
    update        an update() that changes one value, which should not grow with the size
    worker        how long a worker's thread stands still to move to a version
    per tensor    the same weights as a handle of torch.multiprocessing for each tensor, opened once
    nccl          a broadcast to one process for each GPU; left out where there is one GPU
    pickle        the weights through the host and a pipe

Each pair is measured in turns in one run, and its ratio is what counts. Workers look at all values of the versions they
read; a single wrong one ends the benchmark.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import page
from common.measure import percentiles, processes, row
from common.row import LEFT_OUT, Row, times

import shmsync
from shmsync.memory.cuda import refused

SIZES = {"1MB": 1 << 20, "16MB": 1 << 24, "256MB": 1 << 28, "1GB": 1 << 30, "8GB": 1 << 33}
WORKERS = [1, 2, 4]
EQUAL = [1] * 64
LARGE = 1 << 28  # from here on the models' shapes are tried


def llama() -> list[int]:
    """Numbers of elements of an 8B Llama: 32 layers, 8 of 32 heads for keys and values, an embedding and a head."""
    wide, inner, vocabulary = 4096, 14_336, 128_256
    layer = [wide * wide, wide * wide // 4, wide * wide // 4, wide * wide, *[wide * inner] * 3, wide, wide]
    return [vocabulary * wide, *layer * 32, wide, vocabulary * wide]


def mixture() -> list[int]:
    """Numbers of elements of a mixture of experts like Qwen3-30B-A3B: 48 layers of 128 experts."""
    wide, heads, vocabulary = 2048, 4096, 151_936
    attention = [wide * heads, wide * heads // 8, wide * heads // 8, heads * wide, 128, 128, wide, wide]
    layer = [*attention, wide * 128, *[wide * 768] * 3 * 128]
    return [vocabulary * wide, *layer * 48, wide, vocabulary * wide]


MODELS = {"like an 8B Llama": llama, "like a mixture of experts": mixture}
CONTEXT = multiprocessing.get_context("spawn")  # a forked child may not use CUDA


def weights(size: int, device: str, proportions: list[int] = EQUAL) -> dict[str, torch.Tensor]:
    """Tensors of float32 in these proportions, of about `size` bytes in all, none of them empty."""
    whole, words = sum(proportions), size // 4
    return {
        f"layer{number}": torch.ones(max(1, words * each // whole), device=device)
        for number, each in enumerate(proportions)
    }


def whole(tensors: Any, version: int) -> bool:
    return all(bool((tensor == version).all()) for tensor in tensors)


def synchronize() -> None:
    torch.cuda.synchronize()


def timed(work: Callable[[], object], *, synchronized: bool) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    if synchronized:
        synchronize()
    return time.perf_counter() - start


def samples_of(rounds: int, work: Callable[[], object]) -> list[float]:
    return [timed(work, synchronized=True) for _ in range(rounds + 3)][3:]


def follow(handle: Any, index: int, answers: Any) -> None:
    """A worker: moves to each version, and reports whether it was whole and how long its thread stood still."""
    with shmsync.Subscriber(handle, worker=index, timeout=120.0) as sub:
        version = 1
        answers.put((index, version, 0.0, True))
        while True:
            try:
                version = sub.wait_version(version + 1)
            except shmsync.ClosedError:
                return
            start = time.perf_counter()
            with sub.read() as section:
                stall = time.perf_counter() - start
                right = whole(section.weights.values(), section.version)
                version = section.version
            answers.put((index, version, stall, right))


def hold_tensors(pipe: Any) -> None:
    """A worker that opens one handle for each tensor."""
    tensors = pipe.recv()
    pipe.send(len(tensors))
    while pipe.recv() is not None:
        pipe.send(sum(float(tensor[0]) for tensor in tensors.values()))


def arena_rows(
    where: str, size: int, workers: int, rounds: int, device: str = "cuda:0", proportions: list[int] = EQUAL
) -> Iterator[Row]:
    source, answers = weights(size, device, proportions), CONTEXT.Queue()
    size = sum(tensor.nbytes for tensor in source.values())
    floor_from, floor_to = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    publishes, stands, floors, stalls = [], [], [], []
    with (
        shmsync.Publisher(source, slots=2, device=device, timeout=120.0) as pub,
        processes(follow, [(pub.handle, index, answers) for index in range(workers)], CONTEXT),
    ):

        def seen(version: int) -> None:
            """Wait until every worker has looked at this version: what is timed next has the GPU to itself."""
            waiting = set(range(workers))
            while waiting:
                index, found, stall, right = answers.get(timeout=300)
                assert right, f"worker {index} saw torn weights in version {found}"
                if found == version:
                    waiting.discard(index)
                    stalls.append(stall)

        def step(version: int) -> None:
            for tensor in source.values():
                tensor.fill_(version)
            synchronize()

        seen(version := 1)
        for _ in range(rounds + 3):
            for samples, publish in ((publishes, lambda: pub.publish(wait=[])), (stands, pub.publish)):
                version += 1
                step(version)
                samples.append(timed(publish, synchronized=samples is publishes))
                seen(version)
            floors.append(timed(lambda: floor_to.copy_(floor_from), synchronized=True))
        pub.close()  # ends the workers
    yield row(f"publish, {where} / a copy on the GPU", publishes[3:], floors[3:])
    yield row(f"trainer stands still in publish(), {where}", stands[3:])
    yield row(f"worker stands still to move, {where}", stalls[workers:])
    with shmsync.Publisher(source, slots=1, device=device, timeout=120.0) as pub:

        def update() -> None:
            with pub.update(wait=[]) as inside:
                inside["layer0"][:1].add_(1)

        yield row(f"update() of one value, {where}", samples_of(rounds, update))


def peer_rows(where: str, size: int, workers: int, rounds: int) -> Iterator[Row]:
    source = weights(size, "cuda:0")
    ends = [CONTEXT.Pipe() for _ in range(workers)]
    with processes(hold_tensors, [(theirs,) for _, theirs in ends], CONTEXT):

        def ask(message: Any) -> None:
            for mine, _ in ends:
                mine.send(message)
            for mine, _ in ends:
                mine.recv()

        def tell() -> None:
            torch.cuda.synchronize()  # by hand: nothing else orders the workers' kernels
            ask(1)

        def pickled() -> None:
            data = pickle.dumps({name: tensor.cpu() for name, tensor in source.items()})
            for tensor in pickle.loads(data).values():
                tensor.to("cuda:0")

        # torch.multiprocessing: a handle for each tensor
        yield peer(f"per tensor, opened once, {where}", [timed(lambda: ask(source), synchronized=False)])
        if size <= 1 << 28:
            yield peer(f"per tensor, each, {where}", samples_of(rounds, tell))
            yield peer(f"pickle, {where}", samples_of(rounds, pickled))
        for mine, _ in ends:
            mine.send(None)


def peer(what: str, seconds: list[float]) -> Row:
    return Row(what, theirs=times(percentiles(seconds)), check="no arena")


def broadcast(rank: int, size: int, rounds: int, port: int, answers: Any) -> None:
    from torch import distributed

    distributed.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=torch.cuda.device_count()
    )
    torch.cuda.set_device(rank)
    source = weights(size, f"cuda:{rank}")

    def send() -> None:
        for tensor in source.values():
            distributed.broadcast(tensor, 0)

    seconds = samples_of(rounds, send)
    if rank == 0:
        answers.put(seconds)
    distributed.destroy_process_group()


def nccl_row(name: str, size: int, rounds: int, port: int) -> Row:
    answers, ranks = CONTEXT.Queue(), range(torch.cuda.device_count())
    with processes(broadcast, [(rank, size, rounds, port, answers) for rank in ranks], CONTEXT):
        return peer(f"nccl, {name}, {len(ranks)} GPUs", answers.get(timeout=600))


def rows(sizes: dict[str, int], workers: list[int], rounds: int) -> Iterator[Row]:
    for number, (name, size) in enumerate(sizes.items()):
        if size * 5 > (free := torch.cuda.mem_get_info(0)[0]):
            yield Row(name, trouble=f"{LEFT_OUT}: {size * 5:,} bytes are needed, {free:,} are free")
            continue
        for many in workers:
            where = f"{name}, {many} workers"
            yield from arena_rows(where, size, many, rounds)
            yield from peer_rows(where, size, many, rounds)
        for model, proportions in MODELS.items() if size >= LARGE else ():
            yield from arena_rows(f"{name} {model}", size, 1, rounds, proportions=proportions())
        if torch.cuda.device_count() > 1:
            yield nccl_row(name, size, rounds, 29500 + number)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes")
    parser.add_argument("--largest", choices=SIZES, default="8GB")
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)), help="numbers with commas between")
    arguments = parser.parse_args()
    largest = SIZES["16MB"] if arguments.quick else SIZES[arguments.largest]
    sizes = {name: size for name, size in SIZES.items() if size <= largest}
    workers = [int(each) for each in arguments.workers.split(",")]
    rounds = 5 if arguments.quick else 30
    why = refused()
    if arguments.dry_run:
        for name, size in sizes.items():
            print(f"{name}: {len(EQUAL)} tensors; {', '.join(map(str, workers))} workers; {rounds} rounds of each row;")
            if size >= LARGE:
                models = (f"{len(made())} tensors {model}" for model, made in MODELS.items())
                print(f"    {', '.join(models)}; 1 worker")
            print(f"    {size * 5:,} bytes of GPU memory: the weights, two slots, two of the floor")
        print("nccl: only with two GPUs or more; per tensor and pickle: up to 256 MB")
        print("here it can run" if why is None else f"here it would be skipped: {why}")
        return
    if why is not None:
        print(f"skipped: {why}")
        return
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    page.show(rows(sizes, workers, rounds), arguments.out / "gpu")


if __name__ == "__main__":
    main()
