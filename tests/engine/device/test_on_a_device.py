"""An arena on a device: its work is done later, and no process sees the result before, or overwrites it too early.

The device is simulated (support/devices/simulated.py): streams are threads that a gate can hold up.
"""

import threading
from contextlib import contextmanager

import pytest
import torch

import shmsync
from support.devices.simulated import value


@contextmanager
def held_up(stream):
    """What the stream is given inside is done after it."""
    gate = threading.Event()
    stream.give(gate.wait)
    try:
        yield gate
    finally:
        gate.set()


def stream_of(pub):
    """The arena's stream, on which a publisher commits."""
    return pub._writer.arena.device_slab.stream


SLOTS = [1, 3]


def test_a_version_is_visible_when_it_is_copied_and_the_trainer_goes_on(arena):
    source = {"t": torch.full((100,), 1.0)}
    pub, sub = arena(source, 2)
    with held_up(stream_of(pub)):
        source["t"].fill_(2)
        assert pub.publish() == 2
        source["t"].fill_(-1)  # what lies in the host's memory was copied aside
        assert (pub.version, sub.latest, value(sub)) == (1, 1, (1, 1.0))
    assert sub.wait_version(2) == 2
    assert value(sub) == (2, 2.0)
    assert pub.version == 2


def test_in_place_readers_wait_for_the_commit(arena):
    source = {"t": torch.full((100,), 1.0)}
    pub, sub = arena(source, 1)
    with held_up(stream_of(pub)):
        source["t"].fill_(2)
        pub.publish()
        with pytest.raises(shmsync.WriterBusy), sub.read(timeout=0.1):
            pass
    assert value(sub) == (2, 2.0)


@pytest.mark.parametrize("slots", SLOTS)
def test_the_next_publish_waits_for_the_one_under_way(arena, slots):
    source = {"t": torch.full((100,), 1.0)}
    pub, sub = arena(source, slots)
    with held_up(stream_of(pub)):
        pub.publish()
        with pytest.raises(shmsync.WriterBusy, match="still being copied"):
            pub.publish(timeout=0.1)
        with pytest.raises(shmsync.WriterBusy, match="still being copied"):
            pub.publish(wait=[], timeout=0.1)
    source["t"].fill_(3)
    assert pub.publish(wait=[]) == 3
    assert pub.version == 3
    assert value(sub) == (3, 3.0)


@pytest.mark.parametrize("again", ["publish", "update"])
def test_a_write_waits_until_its_deadline_for_one_that_was_given_up(arena, device, again):
    source = {"t": torch.full((100,), 1.0)}
    pub, sub = arena(source, 2)  # with one slot an update() that fails has asked for no copies
    with held_up(stream_of(pub)):
        with device.on(device.stream()):
            with pytest.raises(LookupError), pub.update():
                raise LookupError
            with pytest.raises(shmsync.DeviceBusy, match="which was given up, are still under way on simulated"):
                if again == "publish":
                    pub.publish(timeout=0.1)
                else:
                    with pub.update(timeout=0.1):
                        pass
        assert value(sub, timeout=0.1) == (1, 1.0)
    source["t"].fill_(3)
    pub.publish(wait=[])
    assert value(sub)[1] == 3.0


@pytest.mark.parametrize("how", ["current", "another"])
@pytest.mark.parametrize("slots", SLOTS)
def test_a_slot_is_kept_until_the_kernels_of_its_sections_are_done(arena, device, slots, how):
    source = {"t": torch.full((100,), 1.0)}
    pub, sub = arena(source, slots)
    kernels, seen = device.stream(), []
    with held_up(kernels) as gate:
        with device.on(kernels if how == "current" else device.current()), sub.read() as section:
            weights = section.weights["t"]
            device.kernel(lambda: seen.append(set(weights.tolist())), kernels)
            if how == "another":
                section.release_after(kernels)
        for version in range(2, slots + 1):
            source["t"].fill_(version)
            pub.publish(wait=[])
            value(sub)
        source["t"].fill_(-1)
        with pytest.raises(shmsync.ReaderStalled) as caught:
            pub.publish(timeout=0.2)
        assert caught.value.missing == [0]
        assert pub.version == slots
        gate.set()
    source["t"].fill_(slots + 1)
    assert pub.publish(wait=[]) == slots + 1
    assert seen == [{1.0}]


def test_an_ack_waits_for_kernels_that_use_an_older_version(arena, device):
    source = {"t": torch.ones(100)}
    pub, sub = arena(source, 3)
    kernels = device.stream()
    with held_up(kernels):
        with device.on(kernels), sub.read():
            pass
        pub.publish(wait=[])
        assert sub.refresh()
        with pytest.raises(shmsync.AckTimeout) as caught:
            pub.publish(wait=[0], timeout=0.2)
        assert caught.value.missing == [0]
    sub.refresh()
    assert pub.publish(wait=[]) == 4


@pytest.mark.parametrize("slots", SLOTS)
def test_update_follows_the_current_stream(arena, device, slots):
    source = {"t": torch.full((100,), 1.0), "other": torch.full((5,), 7.0)}
    pub, sub = arena(source, slots)
    stream = device.stream()
    for version in range(2, 30):
        with device.on(stream), pub.update(wait=[]) as weights:
            there = weights["t"]
            device.kernel(lambda there=there, version=version: there.fill_(version))
        assert value(sub) == (version, float(version))
        with sub.read() as section:
            assert section.weights["other"].tolist() == [7.0] * 5


def test_an_optimistic_section_is_judged_when_its_kernels_are_done(arena, device):
    source = {"t": torch.full((100,), 1.0)}
    pub, sub = arena(source, 1, consistency="optimistic")
    kernels = device.stream()
    with device.on(kernels):
        section = sub.read()
        with section:
            device.kernel(lambda: pub.publish(wait=[]) and None)  # the bytes change before the section's kernels end
        assert section.torn


@pytest.mark.parametrize("slots", SLOTS)
def test_a_failure_that_comes_late_takes_the_version_back(arena, device, slots):
    source = {"t": torch.full((100,), 1.0)}
    pub, sub = arena(source, slots)
    while not sub._reader.arena.device_slab.reads.wait(10**8):  # else they are lost too
        pass
    with held_up(stream_of(pub)):
        pub.publish()
        device.fail()
    with pytest.raises(shmsync.DeviceFailed, match="version 2 of arena") as caught:
        pub.publish()
    assert caught.value.version == 2
    assert (pub.version, sub.latest) == (1, 1)
    device.failed = None  # so that the arena can be closed; a real device would need a new process
    if slots == 1:
        with pytest.raises(shmsync.Poisoned):
            value(sub, timeout=0.1)
        pub.publish(wait=[])
    assert value(sub)[1] == 1.0
