"""The memory of a closed publisher on a device stays while a living process has it open."""

import pytest
import torch

import shmsync
from shmsync.memory import deferred_free as lent
from support.devices.on_simulated import attach_there, close_there, value_there
from support.devices.simulated import everywhere
from support.processes import until


@pytest.fixture
def device():
    with everywhere(seed=3, longest=0.0005) as device:
        yield device
    assert lent.sweep() == 0


@pytest.mark.parametrize("end", ["close", "kill"])
def test_memory_that_a_worker_has_open_is_kept(start, device, end):
    worker = start()
    pub = shmsync.Publisher({"t": torch.ones(100)}, slots=2)
    worker.call(attach_there, pub.handle)
    pub.close()
    assert len(device._descriptors) == 1
    assert lent.sweep() == 1
    assert worker.call(value_there) == {1.0}
    if end == "close":
        worker.call(close_there)
    else:
        worker.kill()
    until(lambda: lent.sweep() == 0)
    assert device._descriptors == {}


def test_memory_that_nobody_has_open_goes_at_once(device):
    pub = shmsync.Publisher({"t": torch.ones(100)}, slots=2)
    pub.close()
    assert device._descriptors == {}


def test_a_subscriber_of_the_same_process_keeps_its_own(device):
    pub = shmsync.Publisher({"t": torch.ones(100)}, slots=2)
    sub = shmsync.Subscriber(pub.handle)
    pub.close()
    with sub.read() as section:
        assert set(section.weights["t"].tolist()) == {1.0}
    sub.close()
    assert device._descriptors == {}


@pytest.mark.parametrize("room", [True, False])
def test_the_next_arena_takes_that_memory_if_it_needs_it(start, device, monkeypatch, room):
    """Freeing may wait for all work of the device, so it is done where nothing else helps."""
    worker = start()
    pub = shmsync.Publisher({"t": torch.ones(100)}, slots=2)
    worker.call(attach_there, pub.handle)
    pub.close()
    worker.call(close_there)
    allocate = device.allocate

    def full(size):
        if device._descriptors:
            raise shmsync.NoSpace("the device has no room")
        return allocate(size)

    monkeypatch.setattr(device, "allocate", allocate if room else full)
    next_one = shmsync.Publisher({"t": torch.ones(100)}, slots=2)
    assert len(device._descriptors) == (2 if room else 1)
    if not room:
        with pytest.raises(shmsync.NoSpace, match="no room"):
            shmsync.Publisher({"t": torch.ones(100)})
    next_one.close()
    assert device._descriptors == {}
