"""The collector: real processes that step Gymnasium environments with the newest policy."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import util
from typing import Any, SupportsIndex

import cloudpickle
import torch
from tensordict import TensorDict
from torch import nn

from ..engine.deadlines import names_nearest, timeout_or_default, whole
from ..errors import ClosedError, WorkerDied
from ..schemes import SharedMemWeightSyncScheme, WeightSyncScheme
from ..schemes.devices import DeviceChoice, WorkerDevices
from ..schemes.strategy import WeightStrategy
from .acting import pack
from .collector_process import WorkerSpec
from .pool import CollectorOptions, OnLag, WorkerPool

START_TIMEOUT = 120.0  # seconds
LAST_SEED = 1 << 62  # what Gymnasium, NumPy and torch all take, with room for those of each environment


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
        create_env_fn: makes one gymnasium.Env, or a gymnasium.vector.VectorEnv, whose environments count as the
            worker's and are stepped as one; or a list with one such function for each worker.
        policy: takes observations `[n, ...]` and returns actions `[n, ...]`, or a dict or TensorDict that has them
            under "action"; or a TensorDictModule. The trainer's own module: workers have their own.
        num_workers: processes.
        frames_per_batch: frames in a batch. In sync mode all workers share it evenly; else it comes from one worker.
        total_frames: stop after so many; -1 never does.
        weight_sync_scheme: None is a SharedMemWeightSyncScheme(). The collector shuts it down.
        sync: True: each batch is collected when it is asked for, by all workers, with the newest weights. False:
            workers never stop; each batch is from whichever worker is ready.
        device: where the workers' policies compute: one device for all workers, or a list or tuple with one for each,
            None for the CPU; by default where the scheme has its weights, else on the CPU. On one device they share one
            copy of the weights, on several each has its own. Observations are brought to it, and what the policy
            returns to the host.
        envs_per_worker: how often a worker calls create_env_fn. All its environments are stepped with one call of the
            policy.
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
        on_lag: OnLag = "warn",
        timeout: float | None = None,
        start_timeout: float | None = None,
        start_method: str = "forkserver",
    ) -> None:
        self._closed = True  # until the constructor is done
        self._options = options = CollectorOptions(
            num_workers=whole("num_workers", num_workers, 1),
            frames_per_batch=whole("frames_per_batch", frames_per_batch, 1),
            total_frames=whole("total_frames", total_frames, -1),
            max_lag=math.inf if max_lag is None else whole("max_lag", max_lag, 0),
            on_lag=on_lag,
            sync=sync,
            restart_workers=restart_workers,
            timeout=timeout_or_default(timeout, math.inf),
            start_timeout=timeout_or_default(start_timeout, START_TIMEOUT, "start_timeout"),
        )
        count = whole("envs_per_worker", envs_per_worker, 1)
        base = secrets.randbits(31) if seed is None else whole("seed", seed, 0, LAST_SEED)
        makers = create_env_fn if isinstance(create_env_fn, Sequence) else [create_env_fn] * options.num_workers
        if len(makers) != options.num_workers:
            raise ValueError(
                f"create_env_fn has {len(makers)} functions for {options.num_workers} workers; give one for each, or "
                "one for all"
            )
        if on_lag not in ("warn", "drop"):
            raise ValueError(f'on_lag is "warn" or "drop", not {on_lag!r}')
        options.steps(count)  # refuses what does not divide evenly
        if device is None:
            device = getattr(weight_sync_scheme, "device", None)
        devices = WorkerDevices(device)
        devices.check_workers(options.num_workers)
        self.policy = policy
        self._frames = self._batches_out = 0
        scheme = SharedMemWeightSyncScheme() if weight_sync_scheme is None else weight_sync_scheme
        bound = (
            isinstance(scheme, SharedMemWeightSyncScheme) and len(devices.distinct) < 2
        )  # else it gets private copies
        packed = pack(policy, values=not bound)
        specs = [
            WorkerSpec(
                index,
                cloudpickle.dumps([maker] * count),
                packed,
                scheme,
                base + index * count,
                device=devices.of(index),
            )
            for index, maker in enumerate(makers)
        ]
        self._pool = WorkerPool(specs, scheme, options, devices, start_method)
        self._finalizer = util.Finalize(self, self._pool.end, exitpriority=30)
        try:
            self._pool.start(policy)
        except BaseException:
            self._pool.end()
            raise
        self._closed = False

    def __iter__(self) -> Iterator[TensorDict]:
        return self

    def __next__(self) -> TensorDict:
        self._go_on()
        if 0 <= self._options.total_frames <= self._frames:
            raise StopIteration
        batch = self._pool.next_batch()
        self._frames += batch.numel()
        self._batches_out += 1
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
            with self._pool.reasons(restarts=self._options.restart_workers):
                return self._pool.sender.send(weights, worker_ids)
        except WorkerDied as error:
            if not self._options.restart_workers:
                raise
            dead = [index for index in map(int, error.missing) if self._pool.sender.is_dead(index)]
            for index in dead:
                self._pool.restart(index)
            if len(dead) < len(error.missing):  # others are late
                raise
            return self._pool.sender.version if error.version is None else error.version

    def stats(self) -> CollectorStats:
        """Counts so far."""
        return CollectorStats(
            self._frames, self._batches_out, self._pool.dropped, self._pool.restarts, self._pool.sender.version
        )

    def state_dict(self) -> dict[str, Any]:
        """Counts and the policy. Neither environments nor random generators are saved."""
        self._go_on()
        policy = {
            key: value.clone()
            for key, value in WeightStrategy("state_dict").extract_weights(self.policy).items()
            if torch.is_tensor(value)
        }
        return {"frames": self._frames, "batches": self._batches_out, "policy": policy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counts and the policy, and send the policy to the workers. Episodes continue."""
        self._go_on()
        WeightStrategy("state_dict").apply_weights(self.policy, state["policy"])  # checks all keys first
        self._frames, self._batches_out = state["frames"], state["batches"]
        self.update_policy_weights_()

    def shutdown(self) -> None:
        """End the workers and give their memory back; batches that were handed out stay readable. Idempotent.

        What an environment's close() raises is logged. A Ctrl-C meanwhile ends the workers at once.
        """
        self._closed = True
        self._pool.end()
        self._finalizer.cancel()

    def __enter__(self) -> MultiprocessCollector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _go_on(self) -> None:
        """Refuse a closed collector, and finish what an interrupted call has left half done."""
        if self._closed:
            raise ClosedError("this collector was shut down; make a new one")
        self._pool.finish_restarts()
