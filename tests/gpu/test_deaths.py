"""Processes that end while the arena is on a GPU: nothing leaks, no process hangs, errors are typed."""

import pytest
import torch

import shmsync
from support.calls import in_forked_child, outcome
from support.devices import on_gpu
from support.processes import until
from support.weights import stamp


def test_ten_killed_workers_leave_the_memory_of_the_gpu_as_it_was(start, device):
    source = on_gpu.weights(1)
    with shmsync.Publisher(source, slots=1, device=device, timeout=30.0) as pub:
        torch.cuda.synchronize()
        before = on_gpu.used(None)
        for version in range(2, 12):
            (worker,) = start(1)
            worker.call(on_gpu.attach, pub.handle)
            worker.call(on_gpu.read)
            worker.kill()
            stamp(source, version)
            assert pub.publish(wait=[]) == version
        until(lambda: on_gpu.used(None) <= before + (8 << 20))


@pytest.mark.parametrize("slots", [1, 2])
def test_a_worker_that_is_killed_with_kernels_under_way_holds_nobody_up(start, device, slots):
    source = on_gpu.weights(1)
    with shmsync.Publisher(source, slots=slots, device=device, timeout=60.0) as pub:
        (worker,) = start(1)
        worker.call(on_gpu.attach, pub.handle)
        worker.begin(on_gpu.storm, 10**9)
        worker.kill()
        for version in range(2, 6):
            stamp(source, version)
            assert pub.publish(wait=[]) == version


def test_a_forked_child_is_refused(device):
    with (
        shmsync.Publisher(on_gpu.weights(1), slots=2, device=device, timeout=30.0) as pub,
        shmsync.Subscriber(pub.handle, worker=0, timeout=30.0) as sub,
    ):
        calls = {
            "publish": pub.publish,
            "read": lambda: sub.read().__enter__(),
            "snapshot": sub.snapshot,
            "state_dict": sub.state_dict,
            "a subscriber": lambda: shmsync.Subscriber(pub.handle, worker=1),
            "a publisher": lambda: shmsync.Publisher({"a": torch.ones(2)}, device=device),
        }
        status, found = in_forked_child(lambda: {what: outcome(call) for what, call in calls.items()})
        assert (status, found) == (0, dict.fromkeys(calls, "ForkedHandle"))
        assert pub.publish(wait=[]) == 2
