"""The collector: real processes that step Gymnasium environments with the newest policy."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import util
from typing import Any, Literal, SupportsIndex

import cloudpickle
import torch
from tensordict import TensorDict
from torch import nn

from ..engine.deadlines import names_nearest, timeout_or_default, whole
from ..errors import AckTimeout, ClosedError, WorkerDied
from ..schemes import SharedMemWeightSyncScheme, WeightSyncScheme
from ..schemes.devices import HOST, DeviceChoice, device_names
from ..schemes.strategy import WeightStrategy
from ..workers.process import context_of, wait_for_any
from . import buffers
from .collector_process import COLLECT, LAYOUT, START
from .member import Member, agreed, end_all
from .policy import pack

START_TIMEOUT = 120.0  # seconds
LAST_SEED = 1 << 62  # what Gymnasium, NumPy and torch all take, with room for those of each environment

_log = logging.getLogger("shmsync")


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
        create_env_fn: makes one gymnasium.Env, or a gymnasium.vector.VectorEnv, whose environments are the worker's
            and are stepped as one; or a list with one such function for each worker.
        policy: takes observations `[n, ...]` and returns actions `[n, ...]`, or a dict or TensorDict that has them
            under "action"; or a TensorDictModule. The trainer's own module: workers have their own.
        num_workers: processes.
        frames_per_batch: frames in a batch. In sync mode all workers share it evenly; else it comes from one worker.
        total_frames: stop after so many; -1 never does.
        weight_sync_scheme: None is a SharedMemWeightSyncScheme(). The collector shuts it down.
        sync: True: each batch is collected when it is asked for, by all workers, with the newest weights. False:
            workers never stop; each batch is from whichever worker is ready.
        device: where the workers' policies compute: one device for all workers, or a list or tuple with one for each,
            None for the CPU; by default where the scheme has its weights, else on the CPU. The default scheme puts the
            weights on it, where it is one; a policy elsewhere than the weights has its own copy. Observations are
            brought to it, and what the policy returns to the host.
        envs_per_worker: single environments in a worker, which are stepped with one call of the policy.
        seed: environments and policies are seeded from it; in sync mode the same seed gives the same frames. None: at
            random.
        restart_workers: start a dead or failed worker again. It joins at the newest version. One that fails before
            it has delivered anything raises all the same.
        max_lag: how many versions older than the newest a frame may be when it is handed out; None: any number.
        on_lag: "warn": hand it out, and warn. "drop": collect the batch again.
        timeout: seconds to wait for a batch; math.inf, the default, waits without limit (but never for a dead worker).
        start_timeout: seconds that the workers have to start; 120 by default.
        start_method: of multiprocessing.

    Raises:
        ValueError: arguments that are out of range or contradict each other.
        TypeError: arguments of another type.
        NoSpace: the batches, the observations or the weights need more memory than is left.
        WorkerDied: a worker died while it started.
        DataMismatch: what an environment or a policy gave does not fit its space.
        Exception: that of a worker's environment or policy, with the worker's traceback as its cause; one that is no
            Exception (SystemExit), or would end the loop (StopIteration), is a RuntimeError that quotes it.
    """

    @names_nearest
    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: nn.Module,
        *,
        num_workers: SupportsIndex,
        frames_per_batch: SupportsIndex,
        total_frames: SupportsIndex = -1,
        weight_sync_scheme: WeightSyncScheme | None = None,
        sync: bool = True,
        device: DeviceChoice = None,
        envs_per_worker: SupportsIndex = 1,
        seed: SupportsIndex | None = None,
        restart_workers: bool = False,
        max_lag: SupportsIndex | None = None,
        on_lag: Literal["warn", "drop"] = "warn",
        timeout: float | None = None,
        start_timeout: float | None = None,
        start_method: str = "forkserver",
    ) -> None:
        self._closed = True  # until the constructor is done
        count_of_workers = whole("num_workers", num_workers, 1)
        self._frames_per_batch = whole("frames_per_batch", frames_per_batch, 1)
        self._total_frames = whole("total_frames", total_frames, -1)
        self._max_lag = math.inf if max_lag is None else whole("max_lag", max_lag, 0)
        self._timeout = timeout_or_default(timeout, math.inf)
        self._start_timeout = timeout_or_default(start_timeout, START_TIMEOUT, "start_timeout")
        self._on_lag, self._sync, self._restart_workers = on_lag, sync, restart_workers
        count = whole("envs_per_worker", envs_per_worker, 1)
        self._seed = secrets.randbits(31) if seed is None else whole("seed", seed, 0, LAST_SEED)
        makers = create_env_fn if isinstance(create_env_fn, Sequence) else [create_env_fn] * count_of_workers
        if len(makers) != count_of_workers:
            raise ValueError(
                f"create_env_fn has {len(makers)} functions for {count_of_workers} workers; give one for each, or "
                "one for all"
            )
        if on_lag not in ("warn", "drop"):
            raise ValueError(f'on_lag is "warn" or "drop", not {on_lag!r}')
        self._steps(count, count_of_workers)  # refuses what does not divide evenly
        if device is None:
            device = getattr(weight_sync_scheme, "device", None)
        devices = device_names(device, count_of_workers)
        self.policy = policy
        places = {each or HOST for each in devices}
        if weight_sync_scheme is None:
            weight_sync_scheme = SharedMemWeightSyncScheme(device=devices[0] if len(places) == 1 else None)
        self._scheme = scheme = weight_sync_scheme
        at_arena = isinstance(scheme, SharedMemWeightSyncScheme) and places == {device_names(scheme.device)[0] or HOST}
        packed = pack(policy, values=not at_arena)  # elsewhere it has private copies
        self._worker_args = [  # what each worker is started with
            (cloudpickle.dumps([maker] * count), packed, scheme, device)
            for maker, device in zip(makers, devices, strict=True)
        ]
        self._context = context_of(start_method)
        self._frames = self._batches = self._restarts = self._dropped = 0
        self._members: dict[int, Member] = {}
        self._filled: dict[tuple[int, int], None] = {}  # (worker, buffer) of each batch, in the order of arrival
        self._buffer = 0  # of the next batch, in sync mode
        self._handed: tuple[int, int] | None = None  # (worker, buffer) that the trainer has, without sync
        self._pid = os.getpid()
        self._finalizer = util.Finalize(self, end_all, (self._members, scheme), exitpriority=30)
        try:
            self._start()
        except BaseException:
            self.shutdown()
            raise
        self._closed = False

    def __iter__(self) -> Iterator[TensorDict]:
        return self

    def __next__(self) -> TensorDict:
        self._go_on()
        if 0 <= self._total_frames <= self._frames:
            raise StopIteration
        batch = self._next_batch()
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
        self._go_on()
        try:
            with self._reasons(restarts=self._restart_workers):
                return self._sender.send(weights, worker_ids)
        except WorkerDied as error:
            if not self._restart_workers:
                raise
            dead = [index for index in map(int, error.missing) if self._sender.is_dead(index)]
            if not all(self._members[index].delivered for index in dead):
                raise
            for index in dead:
                self._restart(index)
            if len(dead) < len(error.missing):  # others are late
                raise
            return self._sender.version if error.version is None else error.version

    def stats(self) -> CollectorStats:
        """Counts so far."""
        return CollectorStats(self._frames, self._batches, self._dropped, self._restarts, self._sender.version)

    def state_dict(self) -> dict[str, Any]:
        """Counts and the policy. Neither environments nor random generators are saved."""
        self._go_on()
        policy = {
            key: value.clone()
            for key, value in WeightStrategy("state_dict").extract_weights(self.policy).items()
            if torch.is_tensor(value)
        }
        return {"frames": self._frames, "batches": self._batches, "policy": policy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counts and the policy, and send the policy to the workers. Episodes continue."""
        self._go_on()
        WeightStrategy("state_dict").apply_weights(self.policy, state["policy"])  # checks all keys first
        self._frames, self._batches = state["frames"], state["batches"]
        self.update_policy_weights_()

    def shutdown(self) -> None:
        """End the workers and give their memory back; batches that were handed out stay readable. Idempotent.

        What an environment's close() raises is on stderr. A Ctrl-C meanwhile ends the workers at once.
        """
        self._closed = True
        if self._pid == os.getpid():  # else this is a forked child; the workers are the trainer's
            end_all(self._members, self._scheme)
        self._finalizer.cancel()

    def __enter__(self) -> MultiprocessCollector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _go_on(self) -> None:
        """Refuse a closed collector, and finish what an interrupted call has left half done."""
        if self._closed:
            raise ClosedError("this collector was shut down; make a new one")
        for index in [index for index, member in self._members.items() if not member.joined]:
            self._restart(index)

    def _steps(self, environments: int, workers: int) -> int:
        """How many steps of each environment are in a batch, where each worker has so many of them.

        Raises ValueError where the frames of a batch do not divide evenly.
        """
        share = environments * (workers if self._sync else 1)
        if self._frames_per_batch % share:
            raise ValueError(
                f"frames_per_batch={self._frames_per_batch} does not divide evenly over the {share} environment(s) of "
                f"a batch; use {max(1, round(self._frames_per_batch / share)) * share}"
            )
        return self._frames_per_batch // share

    # ---- the life of the workers

    def _start(self) -> None:
        """Start all workers, send them their first weights, and give them their rows of the batches."""
        deadline = time.monotonic() + self._start_timeout
        members = [self._start_process(index) for index in range(len(self._worker_args))]
        with self._reasons():
            self._scheme.init_on_sender(
                "policy",
                pipes=[member.weights for member in members],
                procs=[member.process for member in members],
                model=self.policy,
            )
            self._sender = self._scheme.get_sender()
            self._sender.send(timeout=self._start_timeout)
        for member in members:
            member.send(LAYOUT, self._seed)
        self._wait(lambda: all(member.layout for member in members), deadline)
        leaves, self._each = agreed([member.layout for member in members])
        self._memory = buffers.create(leaves, self._each * len(members), self._steps(self._each, len(members)))
        for member in members:
            self._join(member)
            for buffer in () if self._sync else range(buffers.BUFFERS):  # without sync they fill all at once
                member.order(buffer)

    def _restart(self, index: int) -> None:
        """Start a worker again; it joins at the newest version, and does again what it had not delivered."""
        self._restarts += 1
        _log.warning("collector worker %d was lost, and is started again", index)
        earlier = self._members[index]
        earlier.joined = False  # a Ctrl-C before the new one has joined: this is called again
        earlier.close()
        member = self._start_process(index, earlier.orders)
        with self._reasons():
            self._sender.register_worker(index, member.weights, member.process)
            resend = getattr(self._sender, "resend", None)  # not in schemes without pipes
            if resend is not None:
                resend(index, timeout=self._start_timeout)
        self._join(member)

    def _start_process(self, index: int, orders: Sequence[int] = ()) -> Member:
        """Start a worker, with the orders of the one whose place it takes."""
        seed = self._seed + index + 7919 * self._restarts  # see _join()
        self._members[index] = Member(self._context, index, self._worker_args[index], seed, self._filled, orders)
        return self._members[index]

    def _join(self, member: Member) -> None:
        # Environments are numbered through all workers, and seeded so: the same seed gives the same frames, however
        # they are made. After a restart it is another stretch: else delivered frames would come again.
        rows = self._rows(member.index)
        member.send(START, (self._memory, rows, self._seed + rows.start + 7919 * self._restarts))
        for buffer in member.orders:  # those of the worker before it
            member.send(COLLECT, buffer)
        member.joined = True

    def _rows(self, index: int) -> slice:
        """A worker's rows of a batch."""
        return slice(index * self._each, (index + 1) * self._each)

    # ---- their batches

    def _next_batch(self) -> TensorDict:
        """Wait for a batch: with sync one from all workers, else one from whichever is ready.

        Raises AckTimeout, WorkerDied or what a worker failed with.
        """
        while True:
            batch = self._from_all() if self._sync else self._from_one()
            lag = self._sender.version - int(batch["policy_version"].min())
            if lag <= self._max_lag:
                break
            if self._on_lag == "warn":
                warnings.warn(
                    f"frames are {lag} versions old when they are handed out, max_lag is {self._max_lag}; "
                    'send weights less often, or use on_lag="drop"',
                    stacklevel=3,
                )
                break
            self._dropped += 1  # it is collected again
        self._buffer = (self._buffer + 1) % buffers.BUFFERS
        return batch

    def _begin_round(self) -> None:
        """Order the next batch from all workers that have neither this order yet nor filled it."""
        for index, member in self._members.items():
            if self._buffer not in member.orders and (index, self._buffer) not in self._filled:
                member.order(self._buffer)

    def _from_all(self) -> TensorDict:
        self._begin_round()
        deadline = time.monotonic() + self._timeout
        self._wait(lambda: len(self._filled) == len(self._members), deadline)
        self._filled.clear()
        return self._memory.batch(self._buffer)

    def _from_one(self) -> TensorDict:
        if self._handed is not None:  # the trainer is done with it, or it was too old
            index, buffer = self._handed
            self._handed = None
            self._members[index].order(buffer)
        self._wait(lambda: self._filled, time.monotonic() + self._timeout)
        index, buffer = self._handed = next(iter(self._filled))
        del self._filled[index, buffer]
        return self._memory.batch(buffer, self._rows(index))

    # ---- what they say

    @contextmanager
    def _reasons(self, *, restarts: bool = False) -> Iterator[None]:
        """Raise what ended a worker in place of a send's WorkerDied; `restarts`: not if it can start again."""
        try:
            yield
        except WorkerDied as error:
            for member in [self._members[index] for index in error.missing if index in self._members]:
                member.read()
                if member.failure is not None and not (restarts and member.delivered):
                    member.raise_loss()
            raise

    def _wait(self, done: Callable[[], Any], deadline: float) -> None:
        """Until done(). Workers that are lost meanwhile are started again, or raise; AckTimeout at the deadline."""
        while True:
            for member in self._members.values():
                member.read()
            if done():
                return
            lost = next((member for member in self._members.values() if member.lost), None)
            if lost is not None:
                if not (self._restart_workers and lost.delivered):
                    lost.raise_loss()
                self._restart(lost.index)
            elif time.monotonic() >= deadline:
                late = [member for member in self._members.values() if member.orders or member.layout is None]
                names = ", ".join(
                    f"worker {each.index} ({each.peer}{', stopped' if each.peer.stopped else ''})" for each in late
                )
                raise AckTimeout(
                    f"no batch is ready in time from {names}: an environment may be slow or stuck. Give more time with "
                    "timeout=",
                    missing=[each.index for each in late],
                )
            else:
                wait_for_any(self._members, deadline)
