"""On a simulated device no kernel sees anything but its section's version; and each order that is taken away shows."""

import pytest

from shmsync.engine.device_writes import DeviceWrites
from shmsync.engine.reading import ReadPath
from support.device_storm import storm
from support.simulated import HOST, everywhere


@pytest.fixture
def device():
    with everywhere(seed=11, longest=0.0003) as device:
        yield device


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_kernel_sees_another_version(device, slots):
    counted = storm(device, 300, slots=slots)
    assert counted.reads > 0
    assert counted.wrong == 0


def commits_at_once(patch, device):
    patch.setattr(DeviceWrites, "commit", lambda writes: int(writes._writer.commit()))


def sections_let_go_at_once(patch, device):
    patch.setattr(ReadPath, "_reads_end", lambda path, call: call is None or device.call(HOST, call))


def some_follow_nobody(patch, device, forgotten):
    """`forgotten(later, first, own)`: is this order taken away? `own`: the stream of the publisher's copies."""
    follow, begin = device.follow, DeviceWrites.__init__

    def begin_and_tell(writes, place, *rest):
        begin(writes, place, *rest)
        device.own = place.stream

    def follow_or_not(later, first):
        if not forgotten(later, first, device.own):
            follow(later, first)

    patch.setattr(DeviceWrites, "__init__", begin_and_tell)
    patch.setattr(device, "follow", follow_or_not)


def copies_do_not_follow_the_trainer(patch, device):
    some_follow_nobody(patch, device, lambda later, first, own: later is own and first is not HOST)


def the_trainer_does_not_follow_copies(patch, device):
    some_follow_nobody(patch, device, lambda later, first, own: first is own)


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
