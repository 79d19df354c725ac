"""The collector: real processes that step Gymnasium environments with the newest policy."""

from __future__ import annotations

import math
import os
import secrets
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import cloudpickle
import torch
from tensordict import TensorDict
from torch import nn

from ..engine.strategy import WeightStrategy
from ..errors import AckTimeout, ClosedError, WorkerDied
from ..memory.exiting import watch_exit
from ..schemes import SharedMemWeightSyncScheme, WeightSyncScheme
from . import buffers, checks
from .buffers import BUFFERS
from .fleet import DIED, Fleet, WorkerProcess, pack, raise_for
from .worker import BATCH, COLLECT, ERROR, HELLO, LAYOUT, LOAD, START, STATE, WorkerSpec

OnLag = Literal["warn", "wait", "drop"]


@dataclass(frozen=True)
class CollectorStats:
    """Counts since the collector was made."""

    frames: int  # handed out
    batches: int  # handed out
    dropped: int  # batches that were collected again because they were too old
    restarts: int  # workers that were started again
    version: int  # of the newest weights that were sent


class MultiprocessCollector:
    """Collects frames from Gymnasium environments in worker processes, and keeps their policy up to date.

    An iterator of batches, and a context manager:

        with MultiprocessCollector(make_env, policy, num_workers=4, frames_per_batch=512) as collector:
            for batch in collector:
                ...  # train the policy
                collector.update_policy_weights_()

    A batch is a TensorDict of batch size [environments, steps], a row for each environment, in memory that workers
    write into: it stays as it is until the next-but-one batch (sync), or until the next one (sync=False). Its keys are
    "observation", what the policy returned ("action" and more), ("next", "observation"), and with a last dimension of 1
    ("next", "reward"), ("next", "terminated"), ("next", "truncated"), ("next", "done"), ("next", "episode_return") (NaN
    except where an episode ends); "policy_version", the version of the weights that chose this action; "worker".

    Args:
        create_env_fn: makes one gymnasium.Env; or a list with one such function for each worker.
        policy: takes observations `[n, ...]` and returns actions `[n, ...]`, or a dict or TensorDict that has them
            under "action"; or a TensorDictModule. The trainer's own module: workers have their own.
        num_workers: processes.
        frames_per_batch: frames in a batch. In sync mode all workers share it evenly; else it comes from one worker.
        total_frames: stop after so many; -1 never does.
        weight_sync_scheme: None is a SharedMemWeightSyncScheme(). The collector shuts it down.
        sync: True: each batch is collected when it is asked for, by all workers, with the newest weights. False:
            workers never stop; each batch is from whichever worker is ready.
        device: "cpu".
        envs_per_worker: environments that a worker steps together, with one call of the policy.
        seed: environments and policies are seeded from it; in sync mode the same seed gives the same frames. None: at
            random.
        restart_workers: start a dead or failed worker again. It joins at the newest version. One that fails before
            it has delivered anything raises all the same.
        max_lag: how many versions older than the newest a frame may be when it is handed out; None: any number.
        on_lag: "warn": hand it out, and warn. "drop": collect the batch again. "wait": let no worker fall that far
            behind, by waiting for the slowest before a faster one is handed out; what is too old all the same is
            collected again.
        timeout: seconds to wait for a batch; math.inf waits for ever (but never for a dead worker).
        start_timeout: seconds that the workers have to start.
        start_method: of multiprocessing.

    Raises:
        ValueError, TypeError: arguments. WorkerDied: a worker died while it started. The exception of a worker's
        environment or policy, with the worker's traceback as its cause.
    """

    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: nn.Module,
        *,
        num_workers: int,
        frames_per_batch: int,
        total_frames: int = -1,
        weight_sync_scheme: WeightSyncScheme | None = None,
        sync: bool = True,
        device: torch.device | str = "cpu",
        envs_per_worker: int = 1,
        seed: int | None = None,
        restart_workers: bool = False,
        max_lag: int | None = None,
        on_lag: OnLag = "warn",
        timeout: float = math.inf,
        start_timeout: float = 120.0,
        start_method: str = "forkserver",
    ) -> None:
        self._closed = True  # until the constructor is done
        makers = list(create_env_fn) if isinstance(create_env_fn, Sequence) else [create_env_fn] * num_workers
        rows = checks.arguments(num_workers, frames_per_batch, envs_per_worker, sync, device, on_lag, max_lag, makers)
        self.policy = policy
        self._sync = sync
        self._total_frames = total_frames
        self._restart_workers = restart_workers
        self._max_lag = math.inf if max_lag is None else max_lag
        self._on_lag = on_lag
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._frames = self._batches = self._dropped = self._restarts = 0
        self._turn = 0  # the buffer of the next batch in sync mode
        self._handed: tuple[int, int] | None = None  # (worker, buffer) that the trainer has, without sync
        self._ready: deque[tuple[int, int]] = deque()
        # By worker: the buffers that it has yet to fill, each with the newest version when it was told to.
        self._owed: dict[int, dict[int, int]] = {index: {} for index in range(num_workers)}
        self._scheme = SharedMemWeightSyncScheme() if weight_sync_scheme is None else weight_sync_scheme
        self._fleet = Fleet(start_method)
        self._fd = -1
        base = secrets.randbits(31) if seed is None else seed
        packed = pack(policy, values=not isinstance(self._scheme, SharedMemWeightSyncScheme))
        self._specs = [
            WorkerSpec(
                index,
                cloudpickle.dumps([makers[index]] * envs_per_worker),
                packed,
                self._scheme,
                base + index * envs_per_worker,
                (index * envs_per_worker, (index + 1) * envs_per_worker),
            )
            for index in range(num_workers)
        ]
        steps = frames_per_batch // (rows if sync else envs_per_worker)
        try:
            self._start(rows, steps)
        except BaseException:
            _end(self._fleet, self._scheme, self._fd)
            raise
        self._finalizer = weakref.finalize(self, _end, self._fleet, self._scheme, self._fd)
        self._closed = False
        watch_exit()

    def _start(self, rows: int, steps: int) -> None:
        deadline = time.monotonic() + self._start_timeout
        members = [self._fleet.start(spec) for spec in self._specs]
        self._fleet.gather(HELLO, deadline)
        self._scheme.init_on_sender(
            "policy",
            pipes=[member.weights for member in members],
            procs=[member.process for member in members],
            model=self.policy,
        )
        self._sender = self._scheme.get_sender()
        self._sender.send(timeout=self._start_timeout)
        self._fleet.tell_all(LAYOUT)
        layouts = self._fleet.gather(LAYOUT, deadline)
        self._memory, self._fd = buffers.create(checks.agreed(layouts), rows, steps)
        self._fleet.tell_all(START, self._memory.spec)
        if not self._sync:
            for index in self._owed:
                for buffer in range(BUFFERS):
                    self._order(index, buffer)

    def __iter__(self) -> Iterator[TensorDict]:
        return self

    def __next__(self) -> TensorDict:
        self._check()
        if 0 <= self._total_frames <= self._frames:
            raise StopIteration
        batch = self._next_sync() if self._sync else self._next_async()
        self._frames += batch.numel()
        self._batches += 1
        return batch

    def update_policy_weights_(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> int:
        """Send weights to the workers, and wait until they use them. Returns the new version.

        Args:
            weights: a module, a TensorDict or a dict; None: the policy as it is now.
            worker_ids: as in WeightSender.send().

        Raises as WeightSender.send(); with restart_workers, dead workers are started again instead.
        """
        self._check()
        try:
            return self._sender.send(weights, worker_ids)
        except WorkerDied as error:
            if not self._restart_workers:
                raise
            late = [index for index in map(int, error.missing) if not self._sender.is_dead(index)]
            for index in map(int, error.missing):
                if index not in late:
                    self._restart(index)
            if late:
                raise AckTimeout(
                    f"collector workers {late} did not apply version {error.version} in time; the dead run again",
                    version=error.version,
                    missing=late,
                ) from error
        return self._sender.version

    def stats(self) -> CollectorStats:
        """Counts so far."""
        return CollectorStats(self._frames, self._batches, self._dropped, self._restarts, self._sender.version)

    def state_dict(self) -> dict[str, Any]:
        """Counts, the policy, and in sync mode every worker's random generators. Environments are not saved."""
        self._check()
        workers = None
        if self._sync:
            self._fleet.tell_all(STATE)
            workers = self._fleet.gather(STATE, time.monotonic() + self._start_timeout)
        policy = {key: value.clone() for key, value in self.policy.state_dict().items() if torch.is_tensor(value)}
        return {"frames": self._frames, "batches": self._batches, "policy": policy, "workers": workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counts, random generators and the policy, which is also sent to the workers; episodes begin anew.

        Raises ValueError when it is of a collector with another number of workers.
        """
        self._check()
        workers = state["workers"]
        if workers is not None and self._sync:
            if workers.keys() != self._fleet.members.keys():
                raise ValueError(
                    f"the state is of {len(workers)} workers but this collector has {len(self._fleet.members)}; make "
                    f"one with num_workers={len(workers)}"
                )
            for index, content in workers.items():
                self._fleet.members[index].tell(LOAD, content)
            self._fleet.gather(STATE, time.monotonic() + self._start_timeout)
        self._frames, self._batches = state["frames"], state["batches"]
        WeightStrategy("state_dict").apply_weights(self.policy, state["policy"])  # checks all keys first
        self.update_policy_weights_()

    def shutdown(self) -> None:
        """End the workers and give their memory back; batches that were handed out stay readable. Idempotent."""
        if not self._closed:
            self._closed = True
            self._finalizer()

    def __enter__(self) -> MultiprocessCollector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("this collector was shut down; make a new one")

    # Batches.

    def _next_sync(self) -> TensorDict:
        buffer = self._turn
        while True:
            for index, owed in self._owed.items():
                if buffer not in owed:  # else an interrupted next() has ordered it already
                    self._order(index, buffer)
            while any(self._owed.values()):
                self._await_batch(None)
            batch = self._memory.batch(buffer)
            if not self._too_old(batch):
                self._turn = (buffer + 1) % BUFFERS
                return batch

    def _next_async(self) -> TensorDict:
        if self._handed is not None:
            self._order(*self._handed)  # the trainer is done with it
            self._handed = None
        while True:
            behind = self._furthest_behind()
            chosen = next((item for item in self._ready if behind is None or item[0] == behind), None)
            if chosen is None:
                self._ready.append(self._await_batch(None if behind is None else [behind]))
                continue
            self._ready.remove(chosen)
            index, buffer = chosen
            batch = self._memory.batch(buffer, slice(*self._specs[index].rows))
            if self._too_old(batch):
                self._order(index, buffer)
                continue
            self._handed = chosen
            return batch

    def _order(self, index: int, buffer: int) -> None:
        self._owed[index][buffer] = self._sender.version
        self._fleet.members[index].tell(COLLECT, buffer)

    def _await_batch(self, workers: list[int] | None) -> tuple[int, int]:
        """Wait for the next batch of one of these workers, or of any."""
        while True:
            event = next(self._fleet.events(time.monotonic() + self._timeout, workers))
            member, word, content = event
            if word == BATCH:
                member.delivered = True
                if self._owed[member.index].pop(content, None) is not None:
                    return member.index, content
            if word in (DIED, ERROR):
                self._lost(event)

    def _lost(self, event: tuple[WorkerProcess, str, Any]) -> None:
        member = event[0]
        if not (self._restart_workers and member.delivered):
            raise_for(event)
        self._restart(member.index)

    def _restart(self, index: int) -> None:
        """Start a worker again; it joins at the newest version, and does again what it had not delivered."""
        deadline = time.monotonic() + self._start_timeout
        self._restarts += 1
        # Another stretch of the same seed would repeat the frames that the dead one has delivered already.
        spec = replace(self._specs[index], seed=self._specs[index].seed + 7919 * self._restarts)
        member = self._fleet.start(spec)
        self._fleet.gather(HELLO, deadline, [index])
        self._sender.register_worker(index, member.weights, member.process)
        resend = getattr(self._sender, "resend", None)  # not in schemes without pipes
        if resend is not None:
            resend(index, timeout=self._start_timeout)
        member.tell(START, self._memory.spec)
        for buffer in list(self._owed[index]):
            self._order(index, buffer)

    # Lag.

    def _too_old(self, batch: TensorDict) -> bool:
        """Must the batch be collected again? Counts it as dropped then, or only warns."""
        lag = self._sender.version - int(batch["policy_version"].min())
        if lag <= self._max_lag:
            return False
        if self._on_lag == "warn":
            warnings.warn(
                f"frames are {lag} versions old when they are handed out, max_lag is {self._max_lag}; send weights "
                'less often, or use on_lag="wait" or "drop"',
                stacklevel=4,
            )
            return False
        self._dropped += 1
        return True

    def _furthest_behind(self) -> int | None:
        """The worker to wait for, whose frames would be too old with the next version; None: any worker."""
        if self._on_lag != "wait":
            return None
        oldest = {index: min([*owed.values()], default=self._sender.version) for index, owed in self._owed.items()}
        for index, buffer in self._ready:
            rows = slice(*self._specs[index].rows)
            version = int(self._memory.tensors[buffer][("policy_version",)][rows].min())
            oldest[index] = min(oldest[index], version)
        index = min(oldest, key=oldest.__getitem__)
        return index if self._sender.version - oldest[index] >= self._max_lag else None


def _end(fleet: Fleet, scheme: WeightSyncScheme, fd: int) -> None:
    if fleet.pid != os.getpid():  # this is a forked child that ends; the workers are the trainer's
        return
    try:
        fleet.stop()
    finally:
        try:
            scheme.shutdown()
        finally:
            if fd >= 0:
                os.close(fd)
