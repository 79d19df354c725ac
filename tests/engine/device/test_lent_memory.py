"""The memory of a closed publisher on a device stays while a living process has it open."""

import pytest
import torch

import shmsync
from shmsync.memory.arena import free_unused
from support.devices.simulated import everywhere
from support.processes import until


def attach_there(state, handle):
    state.everywhere = everywhere(seed=4, longest=0.0005)
    state.everywhere.__enter__()
    state.sub = shmsync.Subscriber(handle, worker=0)


def value_there(state):
    with state.sub.read() as section:
        return set(section.weights["t"].tolist())


def close_there(state):
    state.sub.close()
    state.everywhere.__exit__(None, None, None)


@pytest.fixture
def device():
    with everywhere(seed=3, longest=0.0005) as device:
        yield device
    assert free_unused() == 0


@pytest.mark.parametrize("end", ["close", "kill"])
def test_memory_that_a_worker_has_open_is_kept(start, device, end):
    worker = start()
    pub = shmsync.Publisher({"t": torch.ones(100)}, slots=2)
    worker.call(attach_there, pub.handle)
    pub.close()
    assert len(device._descriptors) == 1
    assert free_unused() == 1
    assert worker.call(value_there) == {1.0}
    if end == "close":
        worker.call(close_there)
    else:
        worker.kill()
    until(lambda: free_unused() == 0)
    assert device._descriptors == {}
