"""An update of 4 workers beside what people use today, from its start until all have computed with the new weights.

    make bench BENCH=peers
    make bench BENCH=peers ARGS="--sections '1 MB in 14 tensors'"
    make bench BENCH=peers ARGS=--docs        and puts the table into docs/performance.md, and the chart into docs/plots

A worker computes the smallest and the largest element of all weights. Both must be the value that all elements of the
version have: stale or torn weights end the run with status 1. Making new weights is not timed. The peers take turns.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import common
import torch
from common import Row, equal_leaves, extremes
from torch import multiprocessing as torch_multiprocessing

import shmsync

WORKERS = 4
SIZES = {"1 MB in 14 tensors": (14, 1e6), "100 MB in 14 tensors": (14, 1e8), "0.8 MB in 200 tensors": (200, 8e5)}
CHART = "0.8 MB in 200 tensors"  # of the README
OURS = "shmsync, publish()"


def answer(pipe: Connection, tensors: Any) -> None:
    """Compute with the new weights, and say with which."""
    pipe.send(extremes(tensors))


class Peer:
    """The trainer's side: its own weights, workers, and send(), after which every worker computes and answers."""

    def __init__(self, size: str) -> None:
        self.size = size
        self.module = equal_leaves(*SIZES[size])
        self.start()

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.module]

    def crew(self, work: Callable[..., None], arguments: list[tuple[Any, ...]]) -> None:
        self.workers = common.Crew(work, [(self.size, *each) for each in arguments])

    def start(self) -> None:
        raise NotImplementedError

    def prepare(self, value: float) -> None:
        """What a step of an optimizer does: every element changes."""
        common.fill(self.module, value)

    def send(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.workers.close()


# shmsync: an arena, and the two schemes


def arena_worker(pipe: Connection, size: str, handle: shmsync.Handle, index: int) -> None:
    with shmsync.Subscriber(handle, worker=index, timeout=common.PATIENCE) as sub:
        module, seen = sub.bind(equal_leaves(*SIZES[size]), guard=False), 1
        leaves = list(module)  # a ParameterList takes 3 µs to give each
        while True:
            sub.wait_version(seen + 1)
            with sub.read() as section:
                seen = section.version
                found = extremes(leaves)
            pipe.send(found)


class Publish(Peer):
    slots = 1

    def start(self) -> None:
        self.pub = shmsync.Publisher(self.module, slots=self.slots, timeout=common.PATIENCE)
        self.crew(arena_worker, [(self.pub.handle, index) for index in range(WORKERS)])
        self.pub.wait_readers(list(range(WORKERS)), procs=self.workers.processes)

    def send(self) -> None:
        self.pub.publish()

    def close(self) -> None:
        super().close()
        self.pub.close()


class PublishThreeSlots(Publish):
    slots = 3


class Update(Publish):
    """The trainer steps inside update(), in the arena itself. Leaving it publishes."""

    def start(self) -> None:
        super().start()
        self.pub.adopt(self.module)

    def prepare(self, value: float) -> None:
        self.update = self.pub.update()
        self.update.__enter__()
        super().prepare(value)

    def send(self) -> None:
        self.update.__exit__(None, None, None)


def scheme_worker(pipe: Connection, size: str, scheme: Any, ours: Connection, index: int) -> None:
    module = equal_leaves(*SIZES[size])
    scheme.init_on_worker("policy", pipe=ours, model=module, worker_idx=index)
    receiver, leaves, first = scheme.get_receiver(), list(module), True
    while True:
        if receiver.receive(timeout=common.PATIENCE) and not first:
            answer(pipe, leaves)
        first = False  # that one came before the peers took turns


class SharedMem(Peer):
    kind: Any = shmsync.SharedMemWeightSyncScheme

    def start(self) -> None:
        self.scheme = self.kind(timeout=common.PATIENCE)
        pairs = [common.CONTEXT.Pipe() for _ in range(WORKERS)]
        self.crew(scheme_worker, [(self.scheme, theirs, index) for index, (_, theirs) in enumerate(pairs)])
        pipes = [ours for ours, _ in pairs]
        self.scheme.init_on_sender("policy", model=self.module, pipes=pipes, procs=self.workers.processes)
        self.scheme.get_sender().send()

    def send(self) -> None:
        self.scheme.get_sender().send()

    def close(self) -> None:
        super().close()
        self.scheme.shutdown()


class MultiProcess(SharedMem):
    kind = shmsync.MultiProcessWeightSyncScheme


# TorchRL's schemes, without a collector. Its threads apply; a byte lets the workers compute.


def torchrl_worker(pipe: Connection, size: str, scheme: Any, index: int) -> None:
    module = equal_leaves(*SIZES[size])
    scheme.init_on_receiver(model=module, model_id="policy", worker_idx=index)
    scheme.connect(worker_idx=index)
    leaves = list(module)
    while True:
        pipe.recv_bytes()
        answer(pipe, leaves)


class TorchRLSharedMem(Peer):
    kind = "SharedMemWeightSyncScheme"
    own = False  # a message for each worker, with weights that nothing else may change

    def start(self) -> None:
        common.need("torchrl")
        from tensordict import TensorDict
        from torchrl import weight_update

        self.scheme = getattr(weight_update, self.kind)()
        self.weights = TensorDict.from_module(self.module).data
        devices = [torch.device("cpu")] * WORKERS
        source = {"weights": self.weights.clone(), "devices": devices, "model_id": "policy", "ctx": common.CONTEXT}
        self.scheme.init_on_sender(**source)
        self.crew(torchrl_worker, [(self.scheme, index) for index in range(WORKERS)])
        self.scheme.connect()

    def send(self) -> None:
        self.scheme.send(self.weights.clone() if self.own else self.weights)
        for pipe in self.workers.pipes:
            pipe.send_bytes(b"new")

    def close(self) -> None:
        super().close()
        for queues in (self.scheme._weight_init_queues, self.scheme._instruction_queues, self.scheme._ack_queues):
            for queue in queues.values():
                queue.cancel_join_thread()  # it has no reader any more
        threading.Thread(target=self.scheme.shutdown, daemon=True).start()  # it may wait for the workers that are gone


class TorchRLMultiProcess(TorchRLSharedMem):
    kind = "MultiProcessWeightSyncScheme"
    own = True


# Queues, and a shared module


def queue_worker(pipe: Connection, size: str, queue: Any) -> None:
    while True:
        answer(pipe, [torch.as_tensor(each) for each in queue.get()])


class QueueOfTensors(Peer):
    """torch moves each tensor into shared memory, and sends its descriptor."""

    def start(self) -> None:
        context = torch_multiprocessing.get_context("forkserver")
        self.queues = [context.Queue() for _ in range(WORKERS)]
        self.crew(queue_worker, [(queue,) for queue in self.queues])

    def message(self) -> list[Any]:
        return [leaf.clone() for leaf in self.leaves]  # a sent tensor must not be written again

    def send(self) -> None:
        message = self.message()
        for queue in self.queues:
            queue.put(message)

    def close(self) -> None:
        super().close()
        for queue in self.queues:
            queue.cancel_join_thread()


class QueueOfArrays(QueueOfTensors):
    """The bytes go through each pipe."""

    def message(self) -> list[Any]:
        return [leaf.numpy() for leaf in self.leaves]


def shared_worker(pipe: Connection, size: str, shared: list[torch.Tensor], lock: Any) -> None:
    own = [torch.empty_like(leaf) for leaf in shared]
    while True:
        pipe.recv_bytes()
        if lock is None:
            answer(pipe, shared)
        else:
            with lock:
                torch._foreach_copy_(own, shared)
            answer(pipe, own)


class Locked(Peer):
    """What most people write first: module.share_memory(), a lock, and a copy in each worker."""

    locks = True

    def start(self) -> None:
        lock: Any = common.CONTEXT.Lock() if self.locks else None
        self.lock = lock or contextlib.nullcontext()
        self.shared = [leaf.clone().share_memory_() for leaf in self.leaves]
        self.crew(shared_worker, [(self.shared, lock)] * WORKERS)

    def send(self) -> None:
        with self.lock:
            torch._foreach_copy_(self.shared, self.leaves)
        for pipe in self.workers.pipes:
            pipe.send_bytes(b"new")


class Copied(Locked):
    """The floor of publish(): the trainer's own weights are copied once, and nothing prevents torn reads."""

    locks = False


class Bare(Peer):
    """The trainer's own module is the shared one. Only the benchmark's wait for all answers prevents torn reads."""

    def start(self) -> None:
        self.module.share_memory()
        self.crew(shared_worker, [(self.leaves, None)] * WORKERS)

    def send(self) -> None:
        for pipe in self.workers.pipes:
            pipe.send_bytes(b"new")


PEERS: dict[str, type[Peer]] = {
    OURS: Publish,
    "shmsync, publish() with 3 slots": PublishThreeSlots,
    "shmsync, update()": Update,
    "shmsync, SharedMemWeightSyncScheme": SharedMem,
    "shmsync, MultiProcessWeightSyncScheme": MultiProcess,
    "TorchRL, SharedMemWeightSyncScheme": TorchRLSharedMem,
    "TorchRL, MultiProcessWeightSyncScheme": TorchRLMultiProcess,
    "mp.Queue of tensors": QueueOfTensors,
    "mp.Queue of NumPy arrays": QueueOfArrays,
    "share_memory(), a lock, a copy": Locked,
    "share_memory(), one copy, unsafe": Copied,
    "share_memory() alone, unsafe": Bare,
}


def in_turns(size: str, *names: str) -> dict[str, list[float]]:
    """Seconds from the start of an update until all workers have computed with it, of each peer."""
    peers = {name: PEERS[name](size) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    try:
        for number in common.rounds(200, share=len(names) / 2):
            value = 1.0 + number % 8
            for name, peer in peers.items():
                peer.prepare(value)

                def once(peer: Peer = peer, value: float = value) -> None:
                    peer.send()
                    found = peer.workers.answers()
                    assert found == [(value, value)] * WORKERS, f"workers of {name} computed with {found}"  # noqa: B023

                samples[name].append(common.timed(once))
    finally:
        for peer in peers.values():
            peer.close()
    return {name: found[2:] for name, found in samples.items()}  # the first ones touch new pages


def beside(size: str, ours: str, *others: str) -> Iterator[Row]:
    """One of our ways beside each of the others, which all take turns."""
    found = in_turns(size, ours, *others)
    for name in others:
        yield Row(f"{ours}: {size}, {WORKERS} workers", found[ours], name, found[name])


def short(rows: list[Row]) -> str:
    """Each peer's median divided by that of publish() in the same turns, for all sizes."""
    lines = ["| peer | " + " | ".join(SIZES) + " |", "|---" * (1 + len(SIZES)) + "|"]
    for peer in PEERS:
        ratios = {row.section: 1 / row.ratio for row in rows if row.beside == peer and row.ratio}
        cells = ["1.00" if peer == OURS else _ratio(ratios.get(size)) for size in SIZES]
        lines.append(f"| {peer} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(found: float | None) -> str:
    return "–" if found is None else f"{found:.2f}" if found < 10 else f"{found:.0f}"


SECTIONS = {size: [partial(beside, size, OURS, *[name for name in PEERS if name != OURS])] for size in SIZES}


def main() -> None:
    arguments, rows = common.main(__doc__, SECTIONS, "--docs")
    print(short(rows))
    if arguments.docs:
        docs = common.BENCH.parent / "docs"
        common.paste(docs / "performance.md", "peers", f"{arguments.about}\n\n{short(rows)}")
        here = [row for row in rows if row.section == CHART and row.theirs]
        bars = {row.beside: statistics.median(row.theirs) for row in here}
        bars[OURS] = statistics.median(here[0].ours)
        title = f"{CHART}, {WORKERS} workers: median time until all have computed with new weights"
        (docs / "plots" / "peers.svg").write_text(common.chart(title, bars, OURS))
    common.end(arguments)


if __name__ == "__main__":
    main()
