"""The figures of README.md and docs/performance.md in one run, in at most five minutes.

    make bench
    make bench ARGS="--sections copies TorchRL"     some of it
    make bench ARGS=--docs                          and puts it into docs/performance.md, three rows into README.md

A row is one function: it measures ours and a floor or a peer in turns, asserts that the right bytes arrived, and
yields Row(what, ours, name of the other, other). Rates are given as the time of one frame or forward.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import calls
import common
import peers
import torch
from common import Row, beside, equal_leaves, rounds, timed
from torch import nn

import shmsync

WORKERS = 4
HEADLINES = {
    'publish(wait="all"), 50 KB, 4 readers / ping-pong of 50 KB': '50 KB to 4 readers, `publish(wait="all")`',
    "a forward of one of 4 workers, 3.3 MB every 5 ms / share_memory(), a lock, a copy": (
        "one forward of 4 busy workers, new weights every 5 ms"
    ),
    "shmsync, SharedMemWeightSyncScheme: 0.8 MB in 200 tensors, 4 workers / TorchRL, SharedMemWeightSyncScheme": (
        "0.8 MB in 200 tensors to 4 workers, `SharedMemWeightSyncScheme`"
    ),
}


# The machine, and copies


def machine() -> Iterator[Row]:
    with common.crew(calls.echo, [()]) as crew:
        (samples,) = common.in_turns(partial(calls.ping_pong, crew.pipes))
    yield Row("ping-pong of one byte over a pipe", [], "here", samples)
    with torch.no_grad():
        plain = partial(nn.Linear(4, 2), torch.ones(1, 4))
        yield Row("forward of a plain Linear(4, 2)", [], "here", common.in_turns(plain)[0])
    for megabytes in (1, 100):
        source, target = (torch.zeros(megabytes << 20, dtype=torch.uint8) for _ in range(2))
        copy = partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), source.nbytes)
        yield Row(f"memcpy of {megabytes} MB", [], "here", common.in_turns(copy)[0])


def copies(tensors: int, megabytes: float, threads: int) -> Iterator[Row]:
    """publish() beside the faster of memcpy and torch's own copy of the same bytes."""
    module = equal_leaves(tensors, megabytes * 1e6)
    flat = torch.cat([parameter.data for parameter in module])
    target = torch.empty_like(flat)
    ways: dict[str, Callable[[], object]] = {"torch.copy_": lambda: target.copy_(flat)}
    if threads == 1:
        ways["memcpy"] = lambda: ctypes.memmove(target.data_ptr(), flat.data_ptr(), flat.nbytes)
    torch.set_num_threads(threads)
    try:
        name, floor = min(ways.items(), key=lambda way: min(timed(way[1]) for _ in range(4)))
        with shmsync.Publisher(module) as pub:
            what = f"publish() of {megabytes:g} MB in {tensors} tensors, {threads} thread{'s' * (threads > 1)}"
            yield beside(what, pub.publish, name, floor)
            common.fill(module, 2.0)
            pub.publish()
            assert common.extremes(pub.weights.values()) == (2.0, 2.0), "other bytes arrived"
    finally:
        torch.set_num_threads(1)


def snapshot(tensors: int) -> Iterator[Row]:
    module = common.layers(tensors)
    flat = torch.cat([parameter.flatten() for parameter in module.parameters()])
    target = torch.empty_like(flat)
    with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub:
        yield beside(f"snapshot() of {tensors} tensors", sub.snapshot, "memcpy", partial(target.copy_, flat), most=20)
        assert torch.equal(sub.snapshot().weights["0", "weight"], module[0].weight), "other bytes arrived"


# A learner beside busy workers

PRIVATE, BOUND, LOCKED = "private", "bound", "locked"


def policy() -> nn.Module:
    sizes = [64, 512, 512, 512, 512, 8]
    return nn.Sequential(
        *[layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    ).requires_grad_(False)


class Shared:
    """What people write first: a module in shared memory, a number and a lock; and what all processes do now."""

    def __init__(self) -> None:
        self.module = policy().share_memory()
        self.number = common.CONTEXT.Value("l", 0, lock=False)
        self.lock = common.CONTEXT.Lock()
        self.mode = common.CONTEXT.Array("c", 10, lock=False)
        self.forwards = common.CONTEXT.Array("l", WORKERS, lock=False)


def busy(pipe: Connection, handle: shmsync.Handle, shared: Shared, index: int) -> None:
    """A worker that computes without pause; shared.mode says with which weights."""
    with shmsync.Subscriber(handle, worker=index, timeout=common.PATIENCE) as sub, torch.no_grad():
        bound, private, x, seen = sub.bind(policy()), policy(), torch.randn(8, 64), -1
        pipe.send("ready")
        while mode := shared.mode.value.decode():
            if mode == LOCKED and shared.number.value != seen:
                with shared.lock:
                    seen = shared.number.value
                    torch._foreach_copy_(list(private.parameters()), list(shared.module.parameters()))
            (bound if mode == BOUND else private)(x)
            shared.forwards[index] += 1
        with sub.read():
            pipe.send([common.extremes(module.parameters()) for module in (bound, private)])
        pipe.recv()


def learner(how: str, slots: int) -> Iterator[Row]:
    """A step while 4 workers compute without pause with the arena's weights, or with private ones."""
    learners = {kind: policy().requires_grad_() for kind in (PRIVATE, BOUND)}
    steps = {kind: torch.optim.Adam(each.parameters(), lr=1e-3, fused=True) for kind, each in learners.items()}
    x, target, shared, samples = torch.randn(128, 64), torch.randn(128, 8), Shared(), {PRIVATE: [], BOUND: []}
    shared.mode.value = PRIVATE.encode()
    with shmsync.Publisher(learners[BOUND], slots=slots, timeout=common.PATIENCE) as pub:
        if how == "update()":
            pub.adopt(learners[BOUND], steps[BOUND])
        with common.crew(busy, [(pub.handle, shared, index) for index in range(WORKERS)]) as crew:
            crew.answers()

            def step(kind: str) -> None:
                steps[kind].zero_grad()
                (learners[kind](x) - target).square().mean().backward()
                steps[kind].step()
                if kind == BOUND and how != "update()":
                    pub.publish()

            for block in rounds(200, fewest=4, share=1.5):
                kind = (PRIVATE, BOUND)[block % 2]
                shared.mode.value = kind.encode()
                samples[kind] += [timed(partial(step, kind)) for _ in range(11)][1:]
        state = learners[BOUND].state_dict()
        assert all(torch.equal(pub.state_dict()[key], value) for key, value in state.items()), "other bytes arrived"
    what = f"a learner's step with {how}, slots={slots}, {WORKERS} busy workers"
    yield Row(what, samples[BOUND], "private weights", samples[PRIVATE])


def lock() -> Iterator[Row]:
    """Forwards of 4 busy workers and the trainer's write, beside share_memory(), a lock, and a copy in each worker."""
    trainer, shared = policy(), Shared()
    shared.mode.value = PRIVATE.encode()
    writes, forwards = ({BOUND: [], LOCKED: []} for _ in range(2))
    with shmsync.Publisher(trainer, slots=3, timeout=common.PATIENCE) as pub:

        def locked() -> None:
            with shared.lock:
                torch._foreach_copy_(list(shared.module.parameters()), list(trainer.parameters()))
                shared.number.value += 1

        with common.crew(busy, [(pub.handle, shared, index) for index in range(WORKERS)]) as crew:
            crew.answers()
            for _ in rounds(30, fewest=3, share=3):
                for mode, write in ((BOUND, pub.publish), (LOCKED, locked)):
                    shared.mode.value = mode.encode()
                    time.sleep(0.01)  # a forward of the turn before ends
                    done, start = sum(shared.forwards), time.perf_counter()
                    while (now := time.perf_counter()) < start + 0.2:
                        writes[mode].append(timed(write))
                        time.sleep(max(0.0, now + 0.005 - time.perf_counter()))
                    forwards[mode].append((time.perf_counter() - start) / (sum(shared.forwards) - done))
            common.fill(trainer, 5.0)
            pub.publish(), locked()
            time.sleep(0.5)
            shared.mode.value = b""
            assert crew.answers() == [[(5.0, 5.0)] * 2] * WORKERS, "other bytes arrived"
    peer, size = "share_memory(), a lock, a copy", "3.3 MB every 5 ms"
    yield Row(f"a forward of one of {WORKERS} workers, {size}", forwards[BOUND], peer, forwards[LOCKED])
    yield Row(f"writing a version, {size}", writes[BOUND], peer, writes[LOCKED])


# Deaths


def death() -> Iterator[Row]:
    """From the SIGKILL of a worker until publish(wait="all") raises, beside the time until the kernel has ended it."""
    samples, floor = [], []
    for _ in rounds(20, fewest=3, share=2):
        with (
            shmsync.Publisher({"t": torch.zeros(4)}, timeout=common.PATIENCE) as pub,
            common.crew(calls.follow, [(pub.handle, index) for index in range(WORKERS)]) as crew,
        ):
            pub.wait_readers(list(range(WORKERS)), procs=crew.processes)
            os.kill(crew.processes[0].pid, signal.SIGSTOP)  # so that publish() waits for it
            pub.publish()
            start, named = time.perf_counter(), []
            os.kill(crew.processes[0].pid, signal.SIGKILL)
            try:
                pub.publish(wait="all")
            except shmsync.WorkerDied as error:
                samples.append(time.perf_counter() - start)
                named = error.missing
            assert named == [0], f"publish() named {named} as dead"
            floor.append(timed(lambda process=crew.processes[1]: (process.kill(), process.join())))
    yield Row('SIGKILL of a worker until publish(wait="all") raises', samples, "until the process is gone", floor)


# Collectors


def make_env() -> Any:
    import gymnasium

    return gymnasium.make("CartPole-v1")


def make_torchrl_env() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Echo(nn.Module):
    """A policy that acts at random, and shows with every action the number of the update whose weights it used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.number = nn.Parameter(torch.zeros(1000))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low, high = torch.aminmax(self.number)
        action = torch.distributions.Categorical(logits=self.body(observation)).sample()
        ones = torch.ones(action.shape)
        return action, low * ones, high * ones


def echo_policy() -> Any:
    from tensordict.nn import TensorDictModule

    return TensorDictModule(Echo(), ["observation"], ["action", "low", "high"])


def our_collector(policy: Any) -> Any:
    from shmsync.collectors import MultiprocessCollector

    return MultiprocessCollector(
        make_env, policy, num_workers=WORKERS, frames_per_batch=400, total_frames=1_000_000, sync=True
    )


def torchrl_collector(scheme: Any, policy: Any) -> Any:
    from torchrl.collectors import MultiSyncCollector

    return MultiSyncCollector(
        [make_torchrl_env] * WORKERS, policy, frames_per_batch=400, total_frames=-1, cat_results="stack",
        weight_sync_schemes={"policy": scheme},
    )  # fmt: skip


def collectors(what: str, name: str, ours: Callable[[Any], Any], theirs: Callable[[Any], Any]) -> Iterator[Row]:
    """A batch from each in turns, and after it an update of the weights. Each frame is checked for torn weights."""
    common.need("gymnasium", "torchrl")
    policies = [echo_policy() for _ in range(2)]
    made = [make(policy) for make, policy in zip((ours, theirs), policies, strict=True)]
    batches = [iter(each) for each in made]
    frames, updates = ([[], []] for _ in range(2))
    try:
        for number in rounds(100, fewest=5, share=3):
            for index, (collector, policy) in enumerate(zip(made, policies, strict=True)):
                start = time.perf_counter()
                batch = next(batches[index])
                frames[index].append((time.perf_counter() - start) / batch.numel())
                if index == 0:
                    assert torch.equal(batch["low"], batch["high"]), "a frame was computed with torn weights"
                    assert batch["low"].max() == number, "no frame was computed with the newest weights"
                policy.module.number.data.fill_(number + 1)
                updates[index].append(timed(collector.update_policy_weights_))
    finally:
        for collector in made:
            collector.shutdown()
    yield Row(f"a frame of {what}, CartPole, {WORKERS} workers", frames[0][2:], name, frames[1][2:])
    yield Row(f"an update of {what}, 7 tensors, {WORKERS} workers", updates[0][2:], name, updates[1][2:])


def in_torchrl() -> Iterator[Row]:
    common.need("torchrl")
    from torchrl.weight_update import SharedMemWeightSyncScheme

    from shmsync.integrations.torchrl import ShmWeightSyncScheme

    ours, theirs = (partial(torchrl_collector, make()) for make in (ShmWeightSyncScheme, SharedMemWeightSyncScheme))
    yield from collectors("TorchRL's MultiSyncCollector", "its SharedMem scheme", ours, theirs)


def our_own() -> Iterator[Row]:
    common.need("torchrl")
    from torchrl.weight_update import SharedMemWeightSyncScheme

    theirs = partial(torchrl_collector, SharedMemWeightSyncScheme())
    yield from collectors("MultiprocessCollector", "TorchRL's MultiSyncCollector", our_collector, theirs)


def vector_envs() -> Iterator[Row]:
    """Our collector's workers of 4 environments each, beside one process with a vector environment of 8."""
    common.need("gymnasium")
    from gymnasium.vector import SyncVectorEnv

    from shmsync.collectors import MultiprocessCollector

    module, frames = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)), [[], []]
    net, env = Greedy(module), SyncVectorEnv([make_env] * 8)
    seen, _ = env.reset(seed=1)
    with MultiprocessCollector(
        make_env, net, num_workers=2, envs_per_worker=4, frames_per_batch=800, total_frames=10_000_000
    ) as collector:
        for _ in rounds(50, fewest=4, share=2):
            start = time.perf_counter()
            batch = next(collector)
            frames[0].append((time.perf_counter() - start) / batch.numel())
            with torch.no_grad():
                assert torch.equal(net(batch["observation"]), batch["action"]), "another policy has acted"
                start, records = time.perf_counter(), []
                for _ in range(100):
                    action, before = net(torch.from_numpy(seen)), seen
                    seen, *ends, _ = env.step(action.numpy())
                    records.append([action, *map(torch.from_numpy, (before, seen, *ends))])
                _ = [torch.stack(column) for column in zip(*records, strict=True)]
                frames[1].append((time.perf_counter() - start) / 800)
    env.close()
    what = "a frame of MultiprocessCollector, CartPole, 2 workers x 4"
    yield Row(what, frames[0][2:], "SyncVectorEnv(8), recorded", frames[1][2:])


class Greedy(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.body(observation).argmax(-1)


SCHEME, PIPES = "shmsync, SharedMemWeightSyncScheme", "shmsync, MultiProcessWeightSyncScheme"
MANY, LARGE = "0.8 MB in 200 tensors", "100 MB in 14 tensors"

SECTIONS = {
    "machine": [machine],
    "calls": [
        partial(calls.publish, 200),
        partial(calls.refresh, 200, 1),
        partial(calls.refresh, 200, 3),
        calls.small_calls,
        calls.attach,
        partial(calls.update, 14, 185),
    ],
    "waits": [
        partial(calls.wait, 1, 4, "0.6 x"), partial(calls.wait, 4, 4, "0.9 x"), partial(calls.wait, 4, 50_000),
        partial(calls.send, 6, "2 x"), partial(calls.send, 200, "4 x"), death,
    ],
    "copies": [
        partial(copies, 200, 1.6, 1), partial(copies, 14, 1, 1), partial(copies, 14, 100, 1),
        partial(copies, 14, 100, 2), partial(snapshot, 1000),
    ],
    "busy": [partial(learner, "update()", 1), partial(learner, "publish()", 3), lock],
    "schemes": [
        partial(peers.beside, MANY, SCHEME, "TorchRL, SharedMemWeightSyncScheme"),
        partial(peers.beside, LARGE, SCHEME, "TorchRL, SharedMemWeightSyncScheme"),
        partial(peers.beside, MANY, PIPES, "TorchRL, MultiProcessWeightSyncScheme"),
        partial(peers.beside, LARGE, PIPES, "TorchRL, MultiProcessWeightSyncScheme"),
    ],
    "TorchRL": [in_torchrl, our_own],
    "Gymnasium": [vector_envs],
}  # fmt: skip


def main() -> None:
    arguments, rows = common.main(__doc__, SECTIONS, "--docs")
    if arguments.docs:
        root = common.BENCH.parent
        common.paste(root / "docs" / "performance.md", "table", f"{arguments.about}\n\n{common.table(rows)}")
        common.paste(root / "README.md", "headlines", common.headlines(rows, HEADLINES))
    common.end(arguments)


if __name__ == "__main__":
    main()
