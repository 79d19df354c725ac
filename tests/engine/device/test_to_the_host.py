"""Weights on a device, and an arena in the host's memory that the device has pinned: copies and commits come later."""

import threading
import time

import pytest
import torch

import shmsync
from shmsync.engine.converting import ALONE, MANY
from support.devices.simulated import Simulated, installed, value


def open_trainer_there(state, slots):
    """Weights on a device of this process, and an arena in the host's memory."""
    state.device = Simulated(6, longest=0.0005)
    state.installed = installed(state.device)
    state.installed.__enter__()
    with state.device.on(state.device.stream()):
        state.source = {"t": torch.full((1000,), 1.0, device=state.device.torch_device)}
        state.pub = shmsync.Publisher(state.source, slots=slots)
    return state.pub.handle


def begin_half_a_copy(state, value):
    """Publish; the device stands still when a half of the slot is written."""
    device, stream = state.device, state.device.stream()
    reached, copy = threading.Event(), device.copy

    def copy_half(stream, pieces):
        copy(stream, [(to, source, size // 2) for to, source, size in pieces])
        stream.give(reached.set)
        stream.give(threading.Event().wait)

    device.copy = copy_half
    with device.on(stream):
        state.source["t"].fill_(value)
        state.pub.publish()
    assert reached.wait(20)


SLOTS = [1, 3]


@pytest.fixture
def device():
    with installed(made := Simulated(5, 0.0005)), made.on(made.stream()):
        yield made


@pytest.fixture
def pair(device):
    """pair(value, slots=) -> a tensor on the device, its publisher in the host's memory, and a subscriber."""
    opened = []

    def make(number=1.0, slots=2, count=1000, **options):
        there = torch.full((count,), number, device=device.torch_device)
        pub = shmsync.Publisher({"t": there}, slots=slots, timeout=20.0, **options)
        opened.append(pub)
        sub = shmsync.Subscriber(pub.handle, worker=0, timeout=20.0)
        opened.append(sub)
        return there, pub, sub

    yield make
    for each in reversed(opened):
        each.close()
    assert device.pinned == {}


def assert_next_is_seen(there, pub, sub):
    there.fill_(3)
    version = pub.publish(wait=[])
    assert value(sub) == (version, 3.0)


@pytest.mark.parametrize("count", [1000, ALONE // 4])
@pytest.mark.parametrize("slots", SLOTS)
def test_publish_returns_and_the_stream_orders_what_comes_before_and_after(device, pair, slots, count):
    there, pub, sub = pair(slots=slots, count=count)
    for version in range(2, 12):
        there.fill_(-1)
        gate = device.gate(device.current())
        device.kernel(lambda version=version: there.fill_(version))
        assert pub.publish() == version
        assert pub.version == version - 1
        device.kernel(lambda: there.fill_(-2))  # the optimizer's next step
        if slots > 1:
            assert value(sub) == (version - 1, float(version - 1 or 1))
        else:
            with pytest.raises(shmsync.WriterBusy), sub.read(timeout=0.02):
                pass
        gate.set()
        sub.wait_version(version)
        assert value(sub) == (version, float(version))


def test_the_publisher_shows_whole_weights_and_its_next_write_waits(device, pair):
    there, pub, sub = pair(slots=1)
    gate = device.gate(device.current())
    pub.publish()
    with pytest.raises(shmsync.WriterBusy, match="version 2 of arena .* is still being copied on simulated:0"):
        pub.publish(timeout=0.05)
    with pytest.raises(shmsync.WriterBusy), pub.update(timeout=0.05):
        pass
    gate.set()
    assert pub.weights["t"].tolist() == there.tolist()
    with pub.update(wait=[]) as weights:
        weights["t"].fill_(7)
    assert value(sub) == (3, 7.0)


LEAVES = {
    "plain": lambda: torch.ones(7),
    "cast": lambda: torch.ones(9).double(),
    "strided": lambda: torch.ones(6, 4).t()[::2],
    "transposed": lambda: torch.ones(6, 4).t(),
    "large": lambda: torch.ones(ALONE // 4),
    "large cast": lambda: torch.ones(ALONE // 4).double(),
    "whole": lambda: torch.ones(5, dtype=torch.int64),
    "empty": lambda: torch.empty(0),
    "large again": lambda: torch.ones(ALONE // 4),
    "last": lambda: torch.ones(3),
}


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("many", [0, MANY])
def test_leaves_of_every_kind_cross_also_beside_those_of_the_host(device, slots, many):
    host = torch.ones(11)
    there = {key: make().to(device.torch_device) for key, make in LEAVES.items()}
    there |= {f"small {number}": torch.ones(40, device=device.torch_device) for number in range(many)}
    weights = {**there, "host": host, "host, cast": torch.ones(3).half()}
    dtypes = {"*cast": torch.float32}
    with (
        shmsync.Publisher(weights, slots=slots, dtype=dtypes, timeout=20.0) as pub,
        shmsync.Subscriber(pub.handle, timeout=20.0) as sub,
    ):
        for version in range(2, 8):
            if version == 5:  # at other addresses
                there = {key: tensor.clone() for key, tensor in there.items()}
                weights.update(there)
            for tensor in weights.values():
                tensor.fill_(version)
            before = device.copies
            pub.publish(weights)
            assert device.recorded or device.copies - before <= 6
            for tensor in weights.values():
                tensor.fill_(-1)
            sub.wait_version(version)
            with sub.read() as section:
                for key in weights:
                    assert set(section.weights[key].flatten().tolist()) <= {version}, key
        part = {"host": host.fill_(9), "last": there["last"].fill_(9), "plain": there["plain"].fill_(9)}
        assert pub.publish(part, wait=[]) == 8
        with sub.read() as section:
            found = {key: section.weights[key].max().item() for key in (*part, "cast")}
            assert found == {**dict.fromkeys(part, 9), "cast": 7}
    assert bool(device.recorded) == bool(many)


@pytest.mark.parametrize("slots", SLOTS)
def test_an_error_between_copy_and_commit_publishes_nothing(device, pair, slots, monkeypatch):
    there, pub, sub = pair(slots=slots)

    def refused(stream, call):
        raise shmsync.DeviceFailed("no call")

    there.fill_(2)
    with monkeypatch.context() as patch:
        patch.setattr(device, "call", refused)
        gate = device.gate(device.current())
        with pytest.raises(shmsync.DeviceFailed, match="no call"):
            pub.publish()
        with pytest.raises(shmsync.DeviceBusy, match="given up"):  # its copies are still under way
            pub.publish(timeout=0.05)
        gate.set()
    if slots == 1:
        with pytest.raises(shmsync.Poisoned):
            value(sub, timeout=0.05)
    else:
        assert value(sub) == (1, 1.0)
    assert_next_is_seen(there, pub, sub)


@pytest.mark.parametrize("slots", SLOTS)
def test_close_waits_for_the_version_under_way(device, pair, slots):
    there, pub, sub = pair(slots=slots)
    there.fill_(2)
    device.kernel(lambda: time.sleep(0.1))
    pub.publish()
    pub.close()
    assert sub.refresh()
    assert value(sub) == (2, 2.0)
    assert all(readonly for _, readonly in device.pinned.values())


def test_close_gives_a_version_up_that_does_not_come_in_time(device, pair):
    _, pub, sub = pair(slots=2)
    pub._writer.timeout = 0.05
    gate = device.gate(device.current())
    pub.publish()
    pub.close()  # the memory stays until the device is done with it
    gate.set()
    device.settle()
    assert value(sub) == (1, 1.0)
    device.pinned.clear()


@pytest.mark.parametrize("slots", SLOTS)
def test_a_trainer_that_is_killed_in_a_copy_leaves_no_half_version(start, slots):
    trainer = start()
    with shmsync.Subscriber(trainer.call(open_trainer_there, slots), timeout=10.0) as sub:
        assert value(sub) == (1, 1.0)
        trainer.call(begin_half_a_copy, 2)
        if slots > 1:
            assert value(sub) == (1, 1.0)
        trainer.kill()
        if slots > 1:
            assert value(sub) == (1, 1.0)
            with pytest.raises(shmsync.WriterDied):
                sub.wait_version(2)
        else:
            with pytest.raises(shmsync.Poisoned):
                value(sub)
