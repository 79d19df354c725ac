"""Weights on a GPU: what a publish costs, against a bare copy on the device and against other ways to share.

    make bench BENCH=gpu                      gpu.md and gpu.json in bench-results
    make bench BENCH=gpu ARGS=--dry-run      what it would do; needs no GPU
    make bench BENCH=gpu ARGS="--largest 256MB --workers 1,2"

Rows, for each size and number of workers:
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
import json
import multiprocessing
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shmsync
from shmsync.memory.cuda import refused

SIZES = {"1MB": 1 << 20, "16MB": 1 << 24, "256MB": 1 << 28, "1GB": 1 << 30, "8GB": 1 << 33}
WORKERS = [1, 2, 4]
LEAVES = 64
CONTEXT = multiprocessing.get_context("spawn")  # a forked child may not use CUDA


def weights(size: int, device: str) -> dict[str, torch.Tensor]:
    words = size // LEAVES // 4
    return {f"layer{number}": torch.ones(words, device=device) for number in range(LEAVES)}


def whole(tensors: Any, version: int) -> bool:
    return all(bool((tensor == version).all()) for tensor in tensors)


def timed(work: Callable[[], object], *, synchronized: bool) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if synchronized:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def median_of(rounds: int, *works: tuple[Callable[[], object], bool]) -> list[float]:
    """The medians of several kinds of work, done in turns."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 3):
        for kept, (work, synchronized) in zip(times, works, strict=True):
            seconds = timed(work, synchronized=synchronized)
            if number >= 3:
                kept.append(seconds)
    return [statistics.median(kept) for kept in times]


def follow(handle: Any, index: int, answers: Any) -> None:
    """A worker: moves to each version, looks at all of it, and says how long its thread stood still."""
    stalls, torn = [], 0
    with shmsync.Subscriber(handle, worker=index, timeout=120.0) as sub:
        answers.put(("ready", index))
        version = 1
        while True:
            try:
                version = sub.wait_version(version + 1)
            except shmsync.ClosedError:
                break
            start = time.perf_counter()
            with sub.read() as section:
                stalls.append(time.perf_counter() - start)
                torn += not whole(section.weights.values(), section.version)
                version = section.version
    answers.put((index, statistics.median(stalls) if stalls else 0.0, torn))


def hold_tensors(pipe: Any) -> None:
    """A worker that opens one handle for each tensor."""
    tensors = pipe.recv()
    pipe.send(len(tensors))
    while pipe.recv() is not None:
        pipe.send(sum(float(tensor[0]) for tensor in tensors.values()))


def arena_rows(size: int, workers: int, rounds: int) -> dict[str, float]:
    source, answers = weights(size, "cuda:0"), CONTEXT.Queue()
    floor_from, floor_to = (torch.empty(size, dtype=torch.uint8, device="cuda:0") for _ in range(2))
    with shmsync.Publisher(source, slots=2, device="cuda:0", timeout=120.0) as pub:
        processes = [CONTEXT.Process(target=follow, args=(pub.handle, index, answers)) for index in range(workers)]
        for process in processes:
            process.start()
        for _ in processes:
            answers.get(timeout=300)

        def step() -> None:
            for tensor in source.values():
                tensor.fill_(pub.version + 1)
            torch.cuda.synchronize()

        def publish() -> None:
            pub.publish(wait=[])

        publishes, stands, floors = [], [], []
        for number in range(rounds + 3):
            step()
            seconds = timed(publish, synchronized=True)
            step()
            start = time.perf_counter()
            pub.publish()
            stood = time.perf_counter() - start
            pub.publish(wait=[])  # settles the one before
            copied = timed(lambda: floor_to.copy_(floor_from), synchronized=True)
            if number >= 3:
                publishes.append(seconds)
                stands.append(stood)
                floors.append(copied)
    for process in processes:
        process.join()
    told = [answers.get(timeout=60) for _ in processes]
    assert sum(torn for _, _, torn in told) == 0, "a worker saw torn weights"
    with shmsync.Publisher(source, slots=1, device="cuda:0", timeout=120.0) as pub:

        def update() -> None:
            with pub.update(wait=[]) as inside:
                inside["layer0"][:1].add_(1)

        (updated,) = median_of(rounds, (update, True))
    return {
        "publish": statistics.median(publishes),
        "trainer": statistics.median(stands),
        "floor": statistics.median(floors),
        "update": updated,
        "worker": statistics.median(stall for _, stall, _ in told),
    }


def peer_rows(size: int, workers: int, rounds: int) -> dict[str, float]:
    source = weights(size, "cuda:0")
    ends = [CONTEXT.Pipe() for _ in range(workers)]
    processes = [CONTEXT.Process(target=hold_tensors, args=(theirs,)) for _, theirs in ends]
    for process in processes:
        process.start()
    start = time.perf_counter()
    for mine, _ in ends:
        mine.send(source)  # torch.multiprocessing: a handle for each tensor
        mine.recv()
    opened = time.perf_counter() - start

    def tell() -> None:
        torch.cuda.synchronize()  # by hand: nothing else orders the workers' kernels
        for mine, _ in ends:
            mine.send(1)
        for mine, _ in ends:
            mine.recv()

    def pickled() -> None:
        data = pickle.dumps({name: tensor.cpu() for name, tensor in source.items()})
        for tensor in pickle.loads(data).values():
            tensor.to("cuda:0")

    told, through = median_of(rounds, (tell, True), (pickled, True)) if size <= 1 << 28 else (0.0, 0.0)
    for mine, _ in ends:
        mine.send(None)
    for process in processes:
        process.join()
    return {"per tensor, opened once": opened, "per tensor, each": told, "pickle": through}


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

    (seconds,) = median_of(rounds, (send, True))
    if rank == 0:
        answers.put(seconds)
    distributed.destroy_process_group()


def nccl_row(size: int, rounds: int, port: int) -> float:
    answers = CONTEXT.Queue()
    ranks = range(torch.cuda.device_count())
    processes = [CONTEXT.Process(target=broadcast, args=(rank, size, rounds, port, answers)) for rank in ranks]
    for process in processes:
        process.start()
    seconds: float = answers.get(timeout=600)
    for process in processes:
        process.join()
    return seconds


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| size | workers | floor | publish | ratio | trainer | update | worker |", "|" + "---|" * 8]
    for row in rows:
        micro = {key: f"{row[key] * 1e6:,.0f} µs" for key in ("floor", "publish", "trainer", "update", "worker")}
        lines.append(
            f"| {row['size']} | {row['workers']} | {micro['floor']} | {micro['publish']} | "
            f"{row['floor'] / row['publish']:.2f} | {micro['trainer']} | {micro['update']} | {micro['worker']} |"
        )
    return "\n".join(lines)


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
            print(f"{name}: {LEAVES} tensors; {', '.join(map(str, workers))} workers; {rounds} rounds of each row;")
            print(f"    {size * 5:,} bytes of GPU memory: the weights, two slots, two of the floor")
        print("nccl: only with two GPUs or more; per tensor and pickle: up to 256 MB")
        print("here it can run" if why is None else f"here it would be skipped: {why}")
        return
    if why is not None:
        print(f"skipped: {why}")
        return
    rows: list[dict[str, Any]] = []
    for name, size in sizes.items():
        if size * 5 > torch.cuda.mem_get_info(0)[0]:
            print(f"{name} left out: {size * 5:,} bytes are needed, {torch.cuda.mem_get_info(0)[0]:,} are free")
            continue
        for many in workers:
            rows.append(
                {"size": name, "workers": many, **arena_rows(size, many, rounds), **peer_rows(size, many, rounds)}
            )
            print(rows[-1], flush=True)
        if torch.cuda.device_count() > 1:
            rows[-1]["nccl"] = nccl_row(size, rounds, 29500 + len(rows))
        torch.cuda.empty_cache()
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}\n\n{table(rows)}\n"
    (arguments.out / "gpu.md").write_text(text)
    (arguments.out / "gpu.json").write_text(json.dumps(rows, indent=1))
    print(text)


if __name__ == "__main__":
    main()
