"""Checksums of an arena on a device: of what the device has copied, and visible in one step with it."""

import pytest
import torch

import shmsync
from support.devices.simulated import Simulated, installed

pytest.importorskip("xxhash", reason="checksums need xxhash, which shmsync[verify] brings")


@pytest.fixture
def device():
    device = Simulated(7, 0.0005)
    with installed(device):
        yield device


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_version_is_proved_wherever_it_comes_from(device, slots):
    there, host = device.tensor(torch.ones(100)), {"t": torch.ones(100), "u": torch.ones(7)}
    with (
        shmsync.Publisher(host, device=device.name, checksum=True, slots=slots) as pub,
        shmsync.Subscriber(pub.handle) as sub,
    ):
        stream = device.stream()
        with device.on(stream):
            for version in range(2, 30):
                if version % 3 == 0:
                    device.kernel(lambda version=version: there.fill_(version))
                    pub.publish({"t": there})  # "u" keeps its checksum
                    device.kernel(lambda: there.fill_(-1))
                elif version % 3 == 1:
                    host["t"].fill_(version)
                    pub.publish()
                else:
                    with pub.update() as weights:
                        held = weights["u"]
                        device.kernel(lambda held=held, version=version: held.fill_(version))
                sub.wait_version(version)
                assert sub.verify() == (version, 2, (), ())


@pytest.mark.parametrize("slots", [1, 2])
def test_bytes_that_change_after_the_commit_are_found(device, slots):
    with (
        shmsync.Publisher({"t": torch.ones(100)}, device=device.name, checksum=True, slots=slots) as pub,
        shmsync.Subscriber(pub.handle) as sub,
    ):
        net = torch.nn.Module()
        net.t = torch.nn.Parameter(torch.zeros(100, device=device.torch_device))
        sub.bind(net, guard=False)
        sub.verify()
        with torch.no_grad():
            net.t[50] = 2  # the memory of a device is not read-only
        with pytest.raises(shmsync.NotDelivered, match="the arena's t was written after it was published"):
            sub.verify()


@pytest.mark.parametrize("slots", [1, 2])
def test_copies_that_are_not_done_in_time_are_not_published(device, slots):
    there = device.tensor(torch.ones(100))
    with (
        shmsync.Publisher({"t": there}, device=device.name, checksum=True, slots=slots) as pub,
        shmsync.Subscriber(pub.handle) as sub,
    ):
        stream = device.stream()
        gate = device.gate(stream)
        with device.on(stream):
            with pytest.raises(shmsync.WriterBusy, match=r"checksums need the copy; nothing was published"):
                pub.publish({"t": there}, timeout=0.1)
            assert pub.version == 1
            gate.set()
            assert pub.publish({"t": there}, timeout=30, wait=[]) == 2
        sub.wait_version(2)
        assert sub.verify().version == 2
