import pytest
import torch

import shmsync
from shmsync.memory import devices
from support.devices.simulated import Simulated, everywhere

OWN_DEVICE = pytest.mark.no_cuda(reason="these tests bring a device of their own")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "device":
            item.add_marker(OWN_DEVICE)


@pytest.fixture(autouse=True)
def tensors_are_made_in_host_memory():
    """These tests say themselves what lies on a device."""
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(before)


@pytest.fixture
def device():
    other = Simulated(8, longest=0.0005, index=1)
    with everywhere(seed=7, longest=0.0005) as device:
        devices.register(other)
        yield device


@pytest.fixture
def arena(device):
    """arena(weights, slots=) -> a publisher and a subscriber of one arena on the device."""
    opened = []

    def make(weights, slots=2, dtype=None, **options):
        pub = shmsync.Publisher(weights, slots=slots, timeout=20.0, dtype=dtype)
        opened.append(pub)
        sub = shmsync.Subscriber(pub.handle, worker=0, timeout=20.0, **options)
        opened.append(sub)
        return pub, sub

    yield make
    for each in reversed(opened):
        each.close()
