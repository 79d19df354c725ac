"""The collector: real processes that step Gymnasium environments with the newest policy."""

from __future__ import annotations

import math
import secrets
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import cloudpickle
import torch
from tensordict import TensorDict
from torch import nn

from ..engine.strategy import WeightStrategy
from ..engine.wrappers import state_of
from ..errors import AckTimeout, ClosedError, WorkerDied
from ..memory.exiting import watch_exit
from ..schemes import SharedMemWeightSyncScheme, WeightSyncScheme
from . import buffers, checks
from .buffers import BUFFERS, RESULTS
from .ending import Ending
from .fleet import Fleet, raise_closing
from .orders import Orders
from .packing import pack
from .spaces import DiscreteActions
from .worker import LAYOUT, LOAD, START, STATE, WorkerSpec

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
        discrete_actions: what integer actions of Discrete and MultiDiscrete spaces mean that do not start at 0:
            "index", counted from 0 as argmax does, or "value" of the space. None: whichever it can be; a space where
            one number may be both is refused.

    Raises:
        ValueError, TypeError: arguments. NoSpace: the batches, the observations or the weights need more memory than
        is left. WorkerDied: a worker died while it started. The exception of a worker's environment or policy, with
        the worker's traceback as its cause; one that is no Exception (SystemExit), or would end the loop
        (StopIteration), is a RuntimeError that quotes it. ManifestMismatch: what an environment or a policy gave does
        not fit its space.
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
        discrete_actions: DiscreteActions | None = None,
    ) -> None:
        self._closed = True  # until the constructor is done
        makers = list(create_env_fn) if isinstance(create_env_fn, Sequence) else [create_env_fn] * num_workers
        rows = checks.arguments(num_workers, frames_per_batch, envs_per_worker, sync, device, on_lag, max_lag, makers)
        if discrete_actions not in (None, "index", "value"):
            raise ValueError(f'discrete_actions is None, "index" or "value", not {discrete_actions!r}')
        steps = frames_per_batch // (rows if sync else envs_per_worker)
        buffers.check_room(RESULTS, rows, steps)  # the least that they will take
        self.policy = policy
        self._sync = sync
        self._total_frames = total_frames
        self._restart_workers = restart_workers
        self._max_lag = math.inf if max_lag is None else max_lag
        self._on_lag = on_lag
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._frames = self._batches = self._dropped = self._restarts = 0
        # In sync mode: the buffer of the next batch, and the serial that its orders must be newer than. One attribute,
        # so that an interrupt finds the batch handed out, or not.
        self._round = (0, 0)
        self._handed: tuple[int, int] | None = None  # (worker, buffer) that the trainer has, without sync
        self._scheme = SharedMemWeightSyncScheme() if weight_sync_scheme is None else weight_sync_scheme
        self._fleet = Fleet(start_method)
        self._orders = Orders(self._fleet, num_workers)
        self._ending = Ending(self._fleet, self._scheme)
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
                discrete_actions,
            )
            for index in range(num_workers)
        ]
        self._finalizer = weakref.finalize(self, self._ending.abandon)
        try:
            self._start(rows, steps)
        except BaseException:
            self._ending.abandon()
            raise
        self._closed = False
        watch_exit()

    def _start(self, rows: int, steps: int) -> None:
        deadline = time.monotonic() + self._start_timeout
        members = [self._fleet.start(spec) for spec in self._specs]
        self._fleet.greet(deadline)
        with self._reasons():
            self._scheme.init_on_sender(
                "policy",
                pipes=[member.weights for member in members],
                procs=[member.process for member in members],
                model=self.policy,
            )
            self._sender = self._scheme.get_sender()
            self._sender.send(timeout=self._start_timeout)
        layouts = self._fleet.ask(LAYOUT, deadline)
        self._memory, self._ending.fd = buffers.create(checks.agreed(layouts), rows, steps)
        for member in members:
            member.tell(START, self._memory.spec)
            member.joined = True
        if not self._sync:
            for index in self._orders.open:
                for buffer in range(BUFFERS):
                    self._order(index, buffer)

    def __iter__(self) -> Iterator[TensorDict]:
        return self

    def __next__(self) -> TensorDict:
        self._go_on()
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
        self._go_on()
        try:
            with self._reasons(but_restarted=True):
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
        """Counts, the policy, and in sync mode every worker's random generators. Environments are not saved.

        torch.load() reads it with its defaults. After a KeyboardInterrupt it answers at once, between two steps.
        """
        self._go_on()
        workers = self._fleet.ask(STATE, time.monotonic() + self._start_timeout) if self._sync else None
        policy = {key: value.detach().clone() for key, value in state_of(self.policy).items() if torch.is_tensor(value)}
        return {"frames": self._frames, "batches": self._batches, "policy": policy, "workers": workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counts, random generators and the policy, which is also sent to the workers; episodes begin anew.

        Raises ValueError when it is of a collector with another number of workers.
        """
        self._go_on()
        workers = state["workers"]
        restores = workers is not None and self._sync
        if restores and workers.keys() != self._fleet.members.keys():
            raise ValueError(
                f"the state is of {len(workers)} workers but this collector has {len(self._fleet.members)}; make "
                f"one with num_workers={len(workers)}"
            )
        WeightStrategy("state_dict").apply_weights(self.policy, state["policy"])  # checks all keys first
        if restores:
            self._round = (self._round[0], self._orders.serial)  # what was ordered before is of another life
            self._fleet.ask(LOAD, time.monotonic() + self._start_timeout, workers)
        self._frames, self._batches = state["frames"], state["batches"]
        self.update_policy_weights_()

    def shutdown(self) -> None:
        """End the workers and give their memory back; batches that were handed out stay readable. Idempotent.

        Raises what an environment's close() raised, when all is done; while another exception is on its way, that is
        logged. A Ctrl-C meanwhile ends the workers at once.
        """
        underway = sys.exc_info()[1] is not None
        self._closed = True
        failures = self._ending.end()
        self._finalizer.detach()
        raise_closing(failures, quietly=underway)

    def __enter__(self) -> MultiprocessCollector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _go_on(self) -> None:
        """Refuse a closed collector, and finish what an interrupted call has left half done."""
        if self._closed:
            raise ClosedError("this collector was shut down; make a new one")
        for index, member in self._fleet.members.items():
            if not member.joined:
                self._restart(index)
            self._orders.tell(index)

    @contextmanager
    def _reasons(self, *, but_restarted: bool = False) -> Iterator[None]:
        """Raise what ended a worker in place of a send's WorkerDied; `but_restarted`: not if it can start again."""
        try:
            yield
        except WorkerDied as error:
            for index in error.missing:
                member = self._fleet.members.get(index) if isinstance(index, int) else None
                if member is None:
                    continue
                self._fleet.listen(member)
                if member.failure is not None and not (but_restarted and self._restart_workers and member.delivered):
                    member.raise_loss()
            raise

    # Batches.

    def _next_sync(self) -> TensorDict:
        while True:
            buffer = self._begin_round()
            self._await(partial(self._orders.filled, buffer), list(self._orders.open))
            batch = self._memory.batch(buffer)
            if self._too_old(batch):
                self._round = (buffer, self._orders.serial)
                continue
            self._round = ((buffer + 1) % BUFFERS, self._orders.serial)
            return batch

    def _begin_round(self) -> int:
        """Order the next batch from all workers, if an interrupted next() has not done so already."""
        buffer, after = self._round
        for index, orders in self._orders.open.items():
            if buffer not in orders or orders[buffer].serial <= after:
                self._order(index, buffer)
        return buffer

    def _next_async(self) -> TensorDict:
        if self._handed is not None:
            self._order(*self._handed)  # the trainer is done with it
            self._handed = None
        while True:
            behind = self._furthest_behind()
            workers = list(self._orders.open) if behind is None else [behind]
            self._await(partial(self._first_of, workers), workers)
            chosen = self._first_of(workers)
            if chosen is None:  # the worker that had it was started again
                continue
            index, buffer = chosen
            batch = self._memory.batch(buffer, slice(*self._specs[index].rows))
            if self._too_old(batch):
                self._order(index, buffer)
                continue
            self._handed = chosen
            return batch

    def _first_of(self, workers: list[int]) -> tuple[int, int] | None:
        return next((chosen for chosen in self._orders.ready() if chosen[0] in workers), None)

    def _order(self, index: int, buffer: int) -> None:
        self._orders.give(index, buffer, self._sender.version)

    def _await(self, done: Callable[[], Any], workers: list[int]) -> None:
        """Wait until done(). Workers that are lost meanwhile are started again, or raise."""
        deadline = time.monotonic() + self._timeout
        while (lost := self._fleet.wait(done, deadline, workers)) is not None:
            if not (self._restart_workers and lost.delivered):
                lost.raise_loss()
            self._restart(lost.index)

    def _restart(self, index: int) -> None:
        """Start a worker again; it joins at the newest version, and does again what it had not delivered."""
        deadline = time.monotonic() + self._start_timeout
        self._restarts += 1
        self._fleet.members[index].log_loss()
        # Another stretch of the same seed would repeat the frames that the dead one has delivered already.
        spec = replace(self._specs[index], seed=self._specs[index].seed + 7919 * self._restarts)
        member = self._fleet.start(spec)
        self._fleet.greet(deadline, [index])
        with self._reasons():
            self._sender.register_worker(index, member.weights, member.process)
            resend = getattr(self._sender, "resend", None)  # not in schemes without pipes
            if resend is not None:
                resend(index, timeout=self._start_timeout)
        member.tell(START, self._memory.spec)
        member.joined = True
        self._orders.tell(index)

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
        newest = self._sender.version
        oldest = {
            index: min([order.version for order in orders.values() if not order.arrived], default=newest)
            for index, orders in self._orders.open.items()
        }
        for index, buffer in self._orders.ready():
            rows = slice(*self._specs[index].rows)
            version = int(self._memory.tensors[buffer][("policy_version",)][rows].min())
            oldest[index] = min(oldest[index], version)
        index = min(oldest, key=oldest.__getitem__)
        return index if newest - oldest[index] >= self._max_lag else None
