"""What a worker costs before its first call: time until all are attached, processor time and memory of each.

    .venv/bin/python bench/start.py [--workers 16] [--rounds 3] [CASE ...]

Each worker attaches, binds a Linear and calls it; "weights" reads `section.weights` too, for which it imports
tensordict. Each round is a new trainer, so each fork server starts from nothing. Memory is read while all workers run:
private is what a worker has alone, PSS adds its share of the rest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from statistics import median

import psutil
import torch

CASES = ["torch", "spawn", "spawn weights", "workers", "workers weights"]
WAIT = 300.0


def figures():
    """Seconds of processor time so far, and MB: private and PSS."""
    process = psutil.Process()
    spent, memory = process.cpu_times(), process.memory_full_info()
    return spent.user + spent.system, memory.uss / 2**20, memory.pss / 2**20


def use(sub, weights, found):
    net, x = sub.bind(torch.nn.Linear(8, 8)), torch.ones(8)
    with torch.no_grad():
        net(x)
        if weights:
            with sub.read() as section:
                section.weights["weight"].sum()
        sub.wait_version(2, WAIT)  # all are attached
        right = torch.equal(net(x), torch.full((8,), 16.0)) and sub.version == 2
    found.put((*figures(), right))
    sub.wait_version(3, WAIT)  # all have reported


def attach(handle, rank, weights, found):
    from shmsync import Subscriber

    with Subscriber(handle, worker=rank) as sub:
        use(sub, weights, found)


def torch_alone(barrier, found):
    torch.nn.Linear(8, 8)(torch.ones(8))
    barrier.wait(WAIT)
    found.put((*figures(), True))
    barrier.wait(WAIT)


def one(case, count):
    """One round: seconds to all attached, and the figures of each worker."""
    from shmsync import Publisher, Workers

    kind, _, weights = case.partition(" ")
    context = multiprocessing.get_context("forkserver" if kind == "workers" else "spawn")
    found, net = context.SimpleQueue(), torch.nn.Linear(8, 8)
    torch.nn.init.constant_(net.weight, 2.0), torch.nn.init.zeros_(net.bias)
    with Publisher(net, max_readers=count, slots=2) as pub:
        began = time.perf_counter()
        if kind == "workers":
            with Workers(pub, use, count, args=[bool(weights), found], timeout=WAIT):
                return finish(pub, began, count, found)
        barrier = context.Barrier(count + 1)
        each = [(barrier, found) if kind == "torch" else (pub.handle, n, bool(weights), found) for n in range(count)]
        procs = [context.Process(target=torch_alone if kind == "torch" else attach, args=args) for args in each]
        for proc in procs:
            proc.start()
        if kind == "torch":
            barrier.wait(WAIT)
            made = finish(pub, began, count, found)
            barrier.wait(WAIT)
            return made
        pub.wait_readers(range(count), timeout=WAIT, procs=procs)
        return finish(pub, began, count, found)  # Python joins them


def finish(pub, began, count, found):
    seconds = time.perf_counter() - began
    pub.publish()
    workers = [found.get() for _ in range(count)]
    pub.publish()
    assert all(right for *_, right in workers), "a worker computed with other weights"
    return seconds, *(median(each) for each in list(zip(*workers, strict=True))[:3])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, help=", ".join(CASES))
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.workers)))
        return
    rounds = {case: [] for case in options.cases}
    for _ in range(options.rounds):
        for case, seen in rounds.items():
            command = [sys.executable, __file__, "--workers", str(options.workers), "--one", case]
            seen.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    print("| worker | all attached, s | processor time of each, s | private, MB | PSS, MB |\n|---|---|---|---|---|")
    for case, seen in rounds.items():
        seconds, spent, private, pss = map(median, zip(*seen, strict=True))
        print(f"| {case} | {seconds:.1f} | {spent:.2f} | {private:.0f} | {pss:.0f} |")
    print(f"\n{options.workers} workers, median of {options.rounds}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
