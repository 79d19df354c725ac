"""On a simulated device no kernel sees anything but its section's version."""

import pytest

from support.devices.simulated import everywhere
from support.storms.device import storm, storm_of_processes

pytestmark = pytest.mark.slow


@pytest.fixture
def device():
    with everywhere(seed=11, longest=0.0003) as device:
        yield device


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_kernel_sees_another_version(device, slots):
    counted = storm(device, 300, slots=slots)
    assert counted.reads > 0
    assert counted.wrong == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_no_kernel_of_another_process_sees_another_version(device, slots):
    counted = storm_of_processes(device, 300, slots=slots, readers=2, seed=1)
    assert counted.reads >= 2
    assert counted.wrong == 0
