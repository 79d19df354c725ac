"""Is the engine as fast as its floor? Each row is a ratio, or a cost, measured beside its floor in the same run.

    make bench                     every row
    make bench ARGS="copy calls"   some of them
    make bench ARGS="--out DIR"    where results.json goes (default ./bench-results)

Prints p50 and p99. Each row checks the bytes that arrived before it prints. Machines are noisy: rows alternate with
their floor, and only ratios mean anything.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import multiprocessing.connection
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shmsync

torch.set_num_threads(1)
CONTEXT = multiprocessing.get_context("fork")  # cheap to start; every child makes its own Subscriber
LIBC = ctypes.CDLL(None)
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
FUTEX_WAIT, FUTEX_WAKE = 0, 1
RESULTS: list[dict[str, object]] = []


def percentiles(samples: list[float]) -> tuple[float, float]:
    ordered = sorted(samples)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def timed(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def side_by_side(row: str, ours: Callable[[], object], floor: Callable[[], object], rounds: int, limit: str) -> None:
    """Alternate the two, so that a slow moment of the machine hits both."""
    for _ in range(3):
        ours(), floor()
    pairs = [(timed(ours), timed(floor)) for _ in range(rounds)]
    report(row, [a for a, _ in pairs], [b for _, b in pairs], limit)


def report(row: str, ours: list[float], floor: list[float] | None, limit: str) -> None:
    p50, p99 = percentiles(ours)
    result: dict[str, object] = {"row": row, "p50_us": p50 * 1e6, "p99_us": p99 * 1e6, "limit": limit}
    text = f"{row:58} {p50 * 1e6:11.2f} {p99 * 1e6:11.2f}"
    if floor is not None:
        f50, f99 = percentiles(floor)
        result |= {"floor_p50_us": f50 * 1e6, "floor_p99_us": f99 * 1e6, "ratio_p50": p50 / f50, "ratio_p99": p99 / f99}
        text += f" {f50 * 1e6:11.2f} {p50 / f50:7.2f} {p99 / f99:7.2f}"
    else:
        text += " " * 28
    RESULTS.append(result)
    print(f"{text}   {limit}", flush=True)


def per_call(row: str, fn: Callable[[int], None], limit: str, calls: int = 20000) -> None:
    """The cost of one call, from batches; the loop around it is measured too and taken off."""

    def empty(n: int) -> None:
        for _ in range(n):
            pass

    fn(1000)
    loop = min(timed(lambda: empty(calls)) for _ in range(5))
    report(row, [max(0.0, timed(lambda: fn(calls)) - loop) / calls for _ in range(15)], None, limit)


def layers(count: int, total_bytes: int) -> nn.Module:
    """`count` parameters of equal size."""
    each = total_bytes // 4 // count
    return nn.ParameterList([nn.Parameter(torch.rand(each), requires_grad=False) for _ in range(count)])


def copy_rows() -> None:
    for count, megabytes, rounds in ((14, 100, 15), (300, 100, 15), (14, 1000, 5)):
        module = layers(count, megabytes << 20)
        with shmsync.Publisher(module) as pub:
            flat = torch.cat([p.data for p in module])
            target = pub._arena.weights(0, writable=True).get("0").untyped_storage()
            slab = torch.empty(0).set_(target, 0, (flat.numel(),), (1,))
            results = {}
            for name, floor in (
                ("torch.copy_", lambda slab=slab, flat=flat: slab.copy_(flat)),
                ("memcpy", lambda slab=slab, flat=flat: ctypes.memmove(slab.data_ptr(), flat.data_ptr(), flat.nbytes)),
            ):
                results[name] = min(timed(floor) for _ in range(4)), floor
            name, (_, floor) = min(results.items(), key=lambda item: item[1][0])
            side_by_side(f"publish {megabytes} MB in {count} tensors / {name}", pub.publish, floor, rounds, "1.0 x")
            pub.publish()
            assert all(torch.equal(pub.weights[str(i)], p) for i, p in enumerate(module)), "checksum"
    module = layers(200, 1_600_000)
    with shmsync.Publisher(module) as pub:
        flat, slab = torch.cat([p.data for p in module]), torch.empty(400_000)
        ctypes_copy = lambda: ctypes.memmove(slab.data_ptr(), flat.data_ptr(), flat.nbytes)  # noqa: E731
        side_by_side("publish 1.6 MB in 200 tensors / memcpy", pub.publish, ctypes_copy, 300, "+ 15 us")
        module[7].data.fill_(3)
        pub.publish()
        assert torch.equal(pub.weights["7"], module[7]), "checksum"


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def call_rows() -> None:
    with shmsync.Publisher(Identity()) as pub, shmsync.Subscriber(pub.handle) as sub:

        def read(n: int) -> None:
            for _ in range(n):
                with sub.read():
                    pass

        def refresh(n: int) -> None:
            for _ in range(n):
                sub.refresh()

        x = torch.zeros(1)
        bound, free = sub.bind(Identity()), Identity()

        def guarded(n: int) -> None:
            for _ in range(n):
                bound.forward(x)

        def unguarded(n: int) -> None:
            for _ in range(n):
                free.forward(x)

        per_call("read section, enter and leave", read, "0.3 us")
        per_call("refresh(), nothing new", refresh, "0.1 us")
        per_call("unguarded forward (to take off the next row)", unguarded, "-")
        per_call("guarded forward", guarded, "0.6 us more")


def update_rows() -> None:
    for megabytes in (1, 400):
        with shmsync.Publisher({"t": torch.zeros(megabytes << 18)}) as pub:

            def update(n: int, pub: shmsync.Publisher = pub) -> None:
                for _ in range(n):
                    with pub.update():
                        pass

            per_call(f"update() around nothing, {megabytes} MB", update, "3 us", 2000)


def waiting_reader(handle: shmsync.Handle, last: int) -> None:
    with shmsync.Subscriber(handle, timeout=60) as sub:
        while sub.version < last:
            sub.wait_version(sub.version + 1)
            sub.refresh()


def applying_reader(handle: shmsync.Handle, last: int, worker: int) -> None:
    with shmsync.Subscriber(handle, worker=worker, timeout=60) as sub:
        while sub.version < last:
            sub.wait_version(sub.version + 1)
            sub.refresh()
        assert sub.weights["t"].eq(float(last)).all(), "checksum"


def pipe_peer(pipe: multiprocessing.connection.Connection) -> None:
    while pipe.recv_bytes():
        pipe.send_bytes(b"ack")


def ack_rows() -> None:
    rounds = 300
    for readers in (1, 2, 4, 8):
        source = {"t": torch.full((12_500,), 1.0)}
        with shmsync.Publisher(source, timeout=60) as pub:
            workers = [
                CONTEXT.Process(target=applying_reader, args=(pub.handle, rounds + 1, i)) for i in range(readers)
            ]
            pipes = [CONTEXT.Pipe() for _ in range(readers)]
            peers = [CONTEXT.Process(target=pipe_peer, args=(theirs,)) for _, theirs in pipes]
            for process in (*workers, *peers):
                process.start()
            while len(pub.readers()) < readers:
                time.sleep(0.01)
            payload = bytes(50_000)
            ours, floor = [], []
            for version in range(2, rounds + 2):
                source["t"].fill_(version)
                ours.append(timed(lambda pub=pub: pub.publish(wait="all")))

                def ping_pong(pipes: list = pipes, payload: bytes = payload) -> None:
                    for pipe, _ in pipes:
                        pipe.send_bytes(payload)
                    for pipe, _ in pipes:
                        pipe.recv_bytes()

                floor.append(timed(ping_pong))
            for pipe, _ in pipes:
                pipe.send_bytes(b"")
            for process in (*workers, *peers):
                process.join()
                assert process.exitcode == 0
        report(f'publish(wait="all") 50 KB, {readers} readers / pipe ping-pong', ours, floor, "0.7 x")


def raw_sleeper(words: mmap.mmap, me: int, last: int) -> None:
    words_32 = (ctypes.c_uint32 * 64).from_buffer(words)
    seen = 0
    while seen < last:
        LIBC.syscall(SYS_FUTEX, words_32, FUTEX_WAIT, ctypes.c_uint32(seen), None, None, 0)
        seen = words_32[0]
        words_32[32 + me] = seen


def raw_wakes(readers: int, rounds: int) -> list[float]:
    """The floor under waking sleepers: one futex call on a shared word, nothing else."""
    words = mmap.mmap(-1, 4096)  # shared with forked children
    words_32 = (ctypes.c_uint32 * 64).from_buffer(words)
    sleepers = [CONTEXT.Process(target=raw_sleeper, args=(words, i, rounds)) for i in range(readers)]
    for process in sleepers:
        process.start()
    time.sleep(0.2)
    samples = []
    for number in range(1, rounds + 1):
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
    rounds = 300
    for readers in (1, 4):
        with shmsync.Publisher({"t": torch.zeros(1000)}, timeout=60) as pub:
            workers = [CONTEXT.Process(target=waiting_reader, args=(pub.handle, rounds + 1)) for _ in range(readers)]
            for process in workers:
                process.start()
            while len(pub.readers()) < readers:
                time.sleep(0.01)
            samples = []
            for _ in range(rounds):
                start = time.perf_counter()
                with pub.update():
                    pass
                samples.append(time.perf_counter() - start)
                while any(reader.lag or reader.pinned for reader in pub.readers()):
                    time.sleep(0.0005)
            for process in workers:
                process.join()
        floor = raw_wakes(readers, rounds)
        report(f"update() with {readers} asleep in wait_version / futex wake", samples, floor, f"{15 + 6 * readers} us")


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


PRIVATE, BOUND, END = range(3)


def busy_reader(handle: shmsync.Handle, mode: Any, pipe: multiprocessing.connection.Connection) -> None:
    with shmsync.Subscriber(handle, timeout=60) as sub, torch.no_grad():
        modules = {PRIVATE: policy(), BOUND: sub.bind(policy())}
        x = torch.randn(8, 64)
        while (now := mode.value) != END:
            modules[now](x)
        pipe.send(sub.stats())


def learner_rows() -> None:
    """A learner's step while 4 workers compute without pause, with the arena's weights or with private ones."""
    for how, slots in (("update()", 1), ("publish()", 2), ("publish()", 3)):
        learner = policy()
        optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3, fused=True)
        x, target = torch.randn(512, 64), torch.randn(512, 8)
        with shmsync.Publisher(learner, slots=slots, timeout=60) as pub:
            mode = CONTEXT.RawValue("i", PRIVATE)
            pipes = [CONTEXT.Pipe() for _ in range(4)]
            workers = [CONTEXT.Process(target=busy_reader, args=(pub.handle, mode, theirs)) for _, theirs in pipes]
            for process in workers:
                process.start()
            while len(pub.readers()) < 4:
                time.sleep(0.01)
            if slots == 1:
                pub.adopt(learner)

            def step(sync: bool, slots: int = slots, pub: shmsync.Publisher = pub) -> None:
                optimizer.zero_grad()
                (learner(x) - target).square().mean().backward()
                if sync and slots == 1:
                    with pub.update():
                        optimizer.step()
                else:
                    optimizer.step()
                    if sync:
                        pub.publish()

            times: dict[int, list[float]] = {PRIVATE: [], BOUND: []}
            for block in range(60):  # both kinds meet the same slow moments of the machine
                now = mode.value = (PRIVATE, BOUND)[block % 2]
                step(now == BOUND)
                times[now] += [timed(lambda now=now: step(now == BOUND)) for _ in range(20)]
            mode.value = END
            stats = [pipe.recv() for pipe, _ in pipes]
            for process in workers:
                process.join()
            assert all(torch.equal(pub.weights[str(i)]["weight"], learner[i].weight) for i in (0, 2, 4)), "checksum"
            row = f"learner's step with {how}, slots = {slots}, 4 busy readers"
            report(f"{row} / without arena", times[BOUND], times[PRIVATE], "1.05 x")
            mean = [statistics.fmean(times[kind]) for kind in (BOUND, PRIVATE)]
            pins = pub.stats().pin_wait.total / sum(times[BOUND])
            waits = sum(one.wait.count for one in stats)
            print(
                f"    mean {mean[0] * 1e6:.0f} / {mean[1] * 1e6:.0f} us = {mean[0] / mean[1]:.2f}; waiting for pins "
                f"{pins:.1%} of the step (at most 3 % on slots = 1); reader waits {waits} (0 on slots = 3)"
            )
            RESULTS[-1] |= {"mean_ratio": mean[0] / mean[1], "pin_wait_share": pins, "reader_waits": waits}


def move_rows() -> None:
    module = nn.Sequential(*[nn.Linear(44, 44) for _ in range(100)])
    with torch.no_grad(), shmsync.Publisher(module, slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        bound = sub.bind(nn.Sequential(*[nn.Linear(44, 44) for _ in range(100)]))
        x = torch.randn(8, 44)
        moves, forwards = [], []
        for _ in range(200):
            pub.publish()
            moves.append(timed(sub.refresh))
            forwards.append(timed(lambda: bound(x)))
        assert torch.equal(bound(x), module(x)), "checksum"
        report("move to a new version, 200 tensors / one forward", moves, forwards, "0.1 x")


def attach_rows() -> None:
    with shmsync.Publisher({"t": torch.ones(1 << 28)}) as pub:
        samples = []
        for _ in range(10):
            start = time.perf_counter()
            sub = shmsync.Subscriber(pub.handle)
            samples.append(time.perf_counter() - start)
            assert sub.weights["t"][-1] == 1, "checksum"
            sub.close()
        report("attach to 1 GB", samples, None, "10000 us")


ROWS = {
    "calls": call_rows, "update": update_rows, "acks": ack_rows, "sleepers": sleeper_rows, "move": move_rows,
    "attach": attach_rows, "learner": learner_rows, "copy": copy_rows,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="default: all")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {multiprocessing.cpu_count()} processors")
    print(f"{'':58} {'p50 us':>11} {'p99 us':>11} {'floor p50':>11} {'ratio':>7} {'p99':>7}   at most")
    for name in arguments.rows or ROWS:
        ROWS[name]()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "engine.json").write_text(json.dumps(RESULTS, indent=2))


if __name__ == "__main__":
    main()
