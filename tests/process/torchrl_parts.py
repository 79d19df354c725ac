"""Environments, policies and helpers of the TorchRL tests; the collectors' workers import them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import forkserver, resource_tracker

import psutil
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform

from shmsync.integrations.torchrl import ShmWeightSyncScheme

# ---- collectors


class _Server(forkserver.ForkServer):
    """Starts workers that have TorchRL imported already, in a fraction of a second. They get what they need as with
    spawn, TorchRL's default: pickled."""

    def ensure_running(self):
        inherited = forkserver._forkserver
        if multiprocessing.parent_process() is not None and inherited._forkserver_address is not None:
            resource_tracker.ensure_running()  # this process comes from it: its workers do too
            self._forkserver_address, self._forkserver_alive_fd = (
                inherited._forkserver_address,
                inherited._forkserver_alive_fd,
            )
        else:
            super().ensure_running()

    def workers(self):
        """The processes that it has started, and that are still there."""
        pid = self._forkserver_pid
        return set() if pid is None else {each for each in psutil.Process(pid).children() if alive(each.pid)}


server = _Server()
server.set_forkserver_preload(["torchrl.collectors", "shmsync.integrations.torchrl", "torchrl_parts"])


@contextlib.contextmanager
def starting(method="forkserver"):
    """Collectors and processes are started so inside."""
    original, earlier = forkserver.connect_to_new_process, multiprocessing.get_start_method(allow_none=True)
    forkserver.connect_to_new_process = server.connect_to_new_process
    torch.multiprocessing.set_start_method(method, force=True)
    try:
        yield torch.multiprocessing.get_context(method)
    finally:
        forkserver.connect_to_new_process = original
        torch.multiprocessing.set_start_method(earlier, force=True)


@contextlib.contextmanager
def collectors(method="forkserver"):
    """make(policy, ...) -> a collector of two workers, with a scheme for "policy". All are ended in the end, and every
    process they have started is gone then."""
    before, made = server.workers() | set(multiprocessing.active_children()), []

    def make(policy=None, *, kind=MultiSyncCollector, scheme=None, schemes=None, env=None, **options):
        options = {"frames_per_batch": 20, "total_frames": -1, "track_policy_version": True, **options}
        if schemes is None:
            schemes = {"policy": ShmWeightSyncScheme() if scheme is None else scheme}
        envs = env if isinstance(env, list) else [env or Steps] * 2
        with starting(method):
            made.append(kind(envs, policy, weight_sync_schemes=schemes, **options))
        return made[-1]

    try:
        yield make
    finally:
        for collector in made:
            end(collector)
        del made[:]
        torch.set_num_threads(1)  # a collector changes it
        deadline = time.monotonic() + 60
        while left := (server.workers() | set(multiprocessing.active_children())) - before:
            if time.monotonic() > deadline:
                for process in left:
                    process.kill()
                raise AssertionError(f"outlive their collector: {left}")
            time.sleep(0.01)


def end(collector):
    """Whatever state it and its workers are in."""
    for process in getattr(collector, "procs", ()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
    collector.shutdown(raise_on_error=False)
    for process in getattr(collector, "procs", ()):
        process.join(30)
        process.kill()


def pids(collector):
    return [process.pid for process in collector.procs]


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def ask(collector, path, *args):
    """What `path` (a method, below the worker's own collector) returns in each worker."""
    return [ask_one(collector, worker, path, *args) for worker in range(collector.num_workers)]


def ask_one(collector, worker, path, *args):
    """The same for one worker; the others may be dead."""
    pipe = collector.pipes[worker]
    pipe.send(((path, args, {}), "cascade_execute"))
    result, _ = pipe.recv()
    if isinstance(result, Exception):
        raise result
    return result


def tags(collector):
    """The number that each worker's policy carries, by worker: its largest and its smallest element are the same."""
    found = []
    for weights in ask(collector, "policy.read"):
        low, high = min(float(w.min()) for w in weights.values()), max(float(w.max()) for w in weights.values())
        assert low == high, weights
        found.append(low)
    return found


# ---- in a worker


def thread_names():
    return sorted(thread.name for thread in threading.enumerate())


def open_files():
    return len(os.listdir("/proc/self/fd"))


# ---- environments


class Critic(nn.Module):
    """Its one weight is its opinion."""

    def __init__(self, value=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([float(value)]))

    def forward(self):
        return self.value.detach() * 1

    def read(self):
        return float(self.value)


class Steps(EnvBase):
    """Observes the number of steps so far; five are an episode. The reward is the opinion of its critic."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Composite(
            done=Binary(1, dtype=torch.bool, shape=(1,)), terminated=Binary(1, dtype=torch.bool, shape=(1,))
        )
        self.critic = Critic()
        self._steps = 0

    def call(self, function, *args):
        """Run it in this worker."""
        return function(*args)

    def _observed(self, done):
        done = torch.tensor([done])
        return {"observation": torch.tensor([float(self._steps)]), "done": done, "terminated": done.clone()}

    def _reset(self, tensordict=None, **kwargs):
        self._steps = 0
        return TensorDict(self._observed(False), [])

    def _step(self, tensordict):
        self._steps += 1
        return TensorDict({**self._observed(self._steps == 5), "reward": self.critic()}, [])

    def _set_seed(self, seed):
        torch.manual_seed(seed or 0)


class WithValue(Transform):
    """Writes what its value net says into each frame."""

    def __init__(self):
        super().__init__()
        self.value_net = Critic()

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("value", self.value_net())

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("value", self.value_net())

    def transform_observation_spec(self, spec):
        spec["value"] = Unbounded((1,))
        return spec


# ---- policies


class Readable:
    """What a test asks a worker's policy."""

    def read(self):
        return {key: value.detach().clone() for key, value in self.state_dict().items()}


class Tagged(Readable, TensorDictModuleBase):
    """All its weights are the number of the update, and it says in each frame which it saw, at the start of its forward
    and a moment later."""

    def __init__(self, tag=0.0, *, layers=2, size=4, pause=0.0):
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "tag", "first", "last"]
        self.layers = nn.ParameterList([torch.full((size,), float(tag)) for _ in range(layers)])
        self.register_buffer("tag", torch.tensor([float(tag)]))
        self.pause = pause

    def forward(self, tensordict):
        first = self.layers[0].detach().min()
        time.sleep(self.pause)
        last = torch.stack([layer.detach().max() for layer in self.layers]).max()
        ones = torch.ones_like(tensordict["observation"])
        return tensordict.update({"action": ones, "tag": self.tag * ones, "first": first * ones, "last": last * ones})

    def set(self, tag):
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(tag)


def seen(frames):
    """The tag of every frame: each of its parts must be of the same weights."""
    for key in ("first", "last"):
        assert torch.equal(frames[key], frames["tag"]), key
    return frames["tag"].squeeze(-1).long()
