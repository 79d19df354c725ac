"""Environments, policies and helpers of the TorchRL tests; the collectors' workers import them."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import multiprocessing
import os
import threading
import time
from multiprocessing import forkserver, resource_sharer, resource_tracker
from pathlib import Path

import psutil
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv
from torchrl.envs.transforms import Transform, VecNormV2

from shmsync.integrations.torchrl import ShmWeightSyncScheme

# ---- collectors


class _Server(forkserver.ForkServer):
    """Starts workers that have TorchRL imported already, in a fraction of a second. They get what they need as with
    spawn, TorchRL's default: pickled."""

    def ensure_running(self):
        inherited = forkserver._forkserver
        if multiprocessing.parent_process() is not None and inherited._forkserver_address is not None:
            resource_tracker.ensure_running()  # this process comes from it: its workers do too
            self.__dict__.update(item for item in vars(inherited).items() if item[0].startswith("_forkserver_"))
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
        try:
            with starting(method):
                collector = kind(envs, policy, weight_sync_schemes=schemes, **options)
        except BaseException:
            shut(schemes)  # the traceback of a failed test would hold them
            raise
        made.append((collector, [psutil.Process(pid) for pid in pids(collector)]))
        return collector

    try:
        yield make
    finally:
        for each in made:
            end(*each)
        del made[:]
        torch.set_num_threads(1)  # a collector changes it
        resource_sharer.stop(60)  # the thread that hands out tensors which were sent to workers
        deadline = time.monotonic() + 60
        while left := (server.workers() | set(multiprocessing.active_children())) - before:
            if time.monotonic() > deadline:
                for process in left:
                    process.kill()
                raise AssertionError(f"outlive their collector: {left}")
            time.sleep(0.01)


def end(collector, processes):
    """Whatever state it and its workers are in."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    collector.shutdown(raise_on_error=False)
    if not getattr(collector, "closed", True):  # TorchRL gives up when a worker is dead
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    shut(getattr(collector, "_weight_sync_schemes", None) or {})  # the traceback of a failed test would hold it


def shut(schemes):
    for scheme in schemes.values():
        scheme.shutdown()


def pids(collector):
    return [process.pid for process in getattr(collector, "procs", ())]


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


def enter_forwards(collecting, seconds, folder):
    """Let every worker collect, and return when each is in a forward of its Tagged that takes so long."""
    ask(collecting, "policy.call", slow_down, seconds, str(folder))
    for pipe in collecting.pipes:
        pipe.send((None, "continue"))
    while len(os.listdir(folder)) < collecting.num_workers:
        time.sleep(0.005)


class Child:
    """A process of its own that runs function(say, *args), and may hang; say(...) is heard here."""

    def __init__(self, context, function, args):
        self._ours, theirs = context.Pipe(duplex=False)
        place = inspect.getfile(function), function.__name__
        self.process = context.Process(target=run_in_child, args=(place, theirs, args))
        self.process.start()
        theirs.close()

    def hear(self, seconds=None):
        """What it says next; HANGS when it says nothing for so long, and how it ended when it has ended."""
        if not self._ours.poll(seconds):
            return HANGS
        try:
            return self._ours.recv()
        except EOFError:
            self.process.join()
            return f"exit code {self.process.exitcode}"

    def end(self):
        self.process.kill()
        self.process.join()
        self._ours.close()
        for path in segments(self.process.pid):  # what a killed one leaves
            path.unlink()


HANGS = "hangs"


@contextlib.contextmanager
def child(function, *args, method="forkserver"):
    """A Child; in the end it is dead, and the workers that it started are."""
    before = server.workers()
    with starting(method) as context:
        child = Child(context, function, args)
    try:
        yield child
    finally:
        child.end()
        for process in server.workers() - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# ---- in a worker


def run_in_child(place, pipe, args):
    path, name = place
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    getattr(module, name)(pipe.send, *args)


def slow_down(policy, seconds, folder):
    """Its forwards take so long from now on, and say in that folder that they have begun."""
    policy.pause, policy.folder = seconds, folder


def fork_and_join():
    """The exit code of a child that ends as Python programs do."""
    child = multiprocessing.get_context("fork").Process(target=thread_names)
    child.start()
    child.join()
    return child.exitcode


def fork_and_leave():
    """The pid of a child that stays until it is killed."""
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(1)
    return pid


def thread_names():
    return sorted(thread.name for thread in threading.enumerate())


def open_files():
    return len(os.listdir("/proc/self/fd"))


def segments(pid):
    """A process's arenas in /dev/shm."""
    return list(Path("/dev/shm").glob(f"shmsync.{pid}-*"))


def own_segments():
    return segments(os.getpid())


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


def valued():
    return TransformedEnv(Steps(), WithValue())


def normalising():
    return TransformedEnv(Steps(), VecNormV2(in_keys=["observation"], decay=0.9))


def parallel():
    return ParallelEnv(2, Steps, mp_start_method="fork")


# ---- policies


class Readable:
    """What a test asks a worker's policy."""

    def read(self):
        found = self.state_dict().items()
        return {key: value.detach().clone() for key, value in found if isinstance(value, torch.Tensor)}

    def call(self, function, *args):
        """Run it in this worker, on this policy."""
        return function(self, *args)


class Tagged(Readable, TensorDictModuleBase):
    """All its weights are the number of the update, and it says in each frame which it saw, at the start of its forward
    and a moment later."""

    def __init__(self, tag=0.0, *, layers=2, size=4, pause=0.0):
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "tag", "first", "last"]
        self.layers = nn.ParameterList([torch.full((size,), float(tag)) for _ in range(layers)])
        self.register_buffer("tag", torch.tensor([float(tag)]))
        self.pause, self.folder = pause, None

    def forward(self, tensordict):
        first = self.layers[0].detach().min()
        if self.folder is not None:
            Path(self.folder, str(os.getpid())).touch()
        time.sleep(self.pause)
        last = torch.stack([layer.detach().max() for layer in self.layers]).max()
        ones = torch.ones_like(tensordict["observation"])
        return tensordict.update({"action": ones, "tag": self.tag * ones, "first": first * ones, "last": last * ones})

    def set(self, tag):
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(tag)


class PlainTagged(Readable, nn.Module):
    """The same for a module that knows nothing of TensorDicts: its action is the number of the update. TorchRL hands it
    the version too."""

    def __init__(self, tag=0.0, *, pause=0.0):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.tensor([float(tag)])), nn.Parameter(torch.tensor([float(tag)]))
        self.pause = pause

    def forward(self, observation, policy_version=None):
        first = self.weight.detach().clone()
        time.sleep(self.pause)
        return torch.where(first == self.other.detach(), first, -1.0) * torch.ones_like(observation)

    set = Tagged.set


def seen(frames):
    """The tag of every frame: each of its parts must be of the same weights."""
    for key in ("first", "last"):
        assert torch.equal(frames[key], frames["tag"]), key
    return frames["tag"].squeeze(-1).long()


class Fragile(Tagged):
    """Its extra state says whether it can be applied."""

    def __init__(self):
        super().__init__()
        self.broken = torch.tensor(False)

    def get_extra_state(self):
        return {"broken": self.broken.clone()}

    def set_extra_state(self, state):
        if state["broken"]:
            raise RuntimeError("it is broken")


class Acting(Readable, TensorDictModule):
    """A policy of one net, from the observation to the action."""

    def __init__(self, net):
        super().__init__(net, in_keys=["observation"], out_keys=["action"])


class Normalising(nn.Module):
    """BatchNorm in train mode: its forward writes in its buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, observation):
        return self.norm(torch.stack([observation, observation + 1]))[0]


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(1, 1), nn.Linear(1, 1)
        self.other.weight = self.one.weight

    def forward(self, observation):
        return self.other(self.one(observation))


class Remembering(nn.Module):
    """Keeps notes beside its weight; bad ones make it fail."""

    def __init__(self, notes=()):
        super().__init__()
        self.notes = list(notes)
        self.weight = nn.Parameter(torch.full((1,), float(len(self.notes))))

    def get_extra_state(self):
        return {"notes": list(self.notes)}

    def set_extra_state(self, state):
        if "bad" in state["notes"]:
            raise RuntimeError("a bad note")
        self.notes = list(state["notes"])

    def forward(self, observation):
        return self.weight.detach() * torch.ones_like(observation)

    def write(self, *notes):
        """The weight is the number of notes."""
        self.notes += notes
        with torch.no_grad():
            self.weight.fill_(len(self.notes))


class Outer(nn.Module):
    """Two modules with notes, one in the other."""

    def __init__(self):
        super().__init__()
        self.inner = Remembering()
        self.deeper = nn.Sequential(nn.Identity(), Remembering())

    def forward(self, observation):
        return self.inner(observation) + self.deeper(observation)


def notes(policy):
    """What the modules of a policy remember, by their weights: (weight, notes) each."""
    found = [module for module in policy.modules() if isinstance(module, Remembering)]
    return [(int(module.weight), module.notes) for module in found]


def share_memory(policy):
    """Whether the two weights of a Tied lie at one address."""
    return policy.module.one.weight.data_ptr() == policy.module.other.weight.data_ptr()
