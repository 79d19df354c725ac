"""On a simulated device no kernel sees anything but its section's version; and each order that is taken away shows."""

import pytest

from shmsync.engine.device_writes import DeviceWrites
from shmsync.engine.reading import ReadPath
from shmsync.memory import attaching, devices
from support.device_storm import storm
from support.simulated import HOST, Simulated


@pytest.fixture
def device():
    before = dict(devices._of_kind), list(devices._default)
    device = Simulated(seed=11, longest=0.0003)
    devices.register(device, default=True)
    yield device
    devices._of_kind.clear()
    devices._of_kind.update(before[0])
    devices._default[:] = before[1]
    for kept in (attaching._unfinished, devices._unfinished):  # of a device that failed: nothing is done there any more
        kept.clear()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_kernel_sees_another_version(device, slots):
    counted = storm(device, 300, slots=slots)
    assert counted.reads > 0
    assert counted.wrong == 0


def commits_at_once(patch, device):
    patch.setattr(DeviceWrites, "commit", lambda writes: int(writes._writer.commit()))


def sections_let_go_at_once(patch, device):
    patch.setattr(ReadPath, "_reads_end", lambda path, call: call is None or device.call(HOST, call))


def copies_do_not_follow_the_trainer(patch, device):
    follow = device.follow

    def forgets(later, first):
        if later is not device.own or first is HOST:
            follow(later, first)

    whole = DeviceWrites.__init__

    def init(writes, place, *rest):
        whole(writes, place, *rest)
        device.own = place.stream

    patch.setattr(DeviceWrites, "__init__", init)
    patch.setattr(device, "follow", forgets)


def the_trainer_does_not_follow_copies(patch, device):
    follow = device.follow

    def forgets(later, first):
        if first is not device.own:
            follow(later, first)

    whole = DeviceWrites.__init__

    def init(writes, place, *rest):
        whole(writes, place, *rest)
        device.own = place.stream

    patch.setattr(DeviceWrites, "__init__", init)
    patch.setattr(device, "follow", forgets)


FAULTS = [
    commits_at_once,
    sections_let_go_at_once,
    copies_do_not_follow_the_trainer,
    the_trainer_does_not_follow_copies,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("slots", [1, 2])
def test_an_order_that_is_taken_away_shows(device, monkeypatch, fault, slots):
    fault(monkeypatch, device)
    assert any(storm(device, 200, slots=slots, seed=seed).wrong for seed in range(10))
