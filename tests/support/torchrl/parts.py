"""Collectors of TorchRL, started from a fork server that has it imported, and what tests ask their workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from multiprocessing import forkserver, resource_sharer, resource_tracker

import psutil
import torch
from torchrl.collectors import MultiSyncCollector

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import alive
from support.torchrl.environments import Steps


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
server.set_forkserver_preload(["torchrl.collectors", "shmsync.integrations.torchrl", "support.torchrl.policies"])


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


def scheme_of(model, model_id, **options):
    """A scheme for another model than the policy, of two workers."""
    scheme = ShmWeightSyncScheme(**options)
    scheme.init_on_sender(model=model, devices=["cpu", "cpu"], model_id=model_id)
    return scheme


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
