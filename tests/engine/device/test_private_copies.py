"""Buffers and other private copies on a device: they are renewed when all it was asked for before has been done.

The publisher and the subscriber are in one process, so that a stream can be held up between them.
"""

import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import shmsync
from support.devices.simulated import Simulated, installed
from support.jobs.engine import bind_copies

PLACES = ["cpu", "simulated:0", "simulated:1"]  # of the arena; the module lies on the second
NEAR = PLACES[:2]  # a copy between two devices holds up the streams of both, and so the next publish


@pytest.fixture
def device():
    first, second = Simulated(3, 0.0005), Simulated(4, 0.0005, index=1)
    with installed(first, second), second.on(second.stream()):  # the host does not wait for a copy from there
        yield first


class OneBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.zeros(4096))


@contextmanager
def bound(device, arena, slots=2):
    """A publisher of one buffer, a subscriber, and a module that has a copy of it."""
    source, net = OneBuffer(), OneBuffer().to(device.torch_device)
    with (
        shmsync.Publisher(source, device=arena, slots=slots, timeout=60.0) as pub,
        shmsync.Subscriber(pub.handle, timeout=60.0) as sub,
    ):
        bind_copies(sub, net, guard=False)
        yield source, pub, sub, net


def publish(source, pub, value):
    source.b.fill_(value)
    return pub.publish(wait=[])


def look_at(device, net, stream, seen):
    """Let a kernel note what it finds in the copy."""
    copy = net.b.data
    device.kernel(lambda: seen.append(set(torch.ops.simulated.on_host(copy).tolist())), stream)


@pytest.mark.parametrize("enter", ["read", "refresh"])
@pytest.mark.parametrize("arena", PLACES)
def test_kernels_of_every_stream_see_the_version_of_their_section(device, arena, enter):
    with bound(device, arena) as (source, pub, sub, net):
        first, second, seen = device.stream(), device.stream(), []
        for value in range(1, 6):
            publish(source, pub, value)
            first, second = second, first  # each renews the copies while the other one is still busy
            with device.on(first):
                if enter == "refresh":
                    sub.refresh()
                with sub.read():
                    device.kernel(lambda: time.sleep(0.01), first)
                    look_at(device, net, first, seen)
            with device.on(second), sub.read():
                look_at(device, net, second, seen)
        first.record().done.wait()
        second.record().done.wait()
        assert sorted(seen, key=min) == [{float(value)} for value in range(1, 6) for _ in range(2)]


@pytest.mark.parametrize("arena", NEAR)
def test_no_version_is_copied_in_a_capture(device, arena):
    """The copy would become part of the graph, and be made at each replay from a slot that has other weights then."""
    with bound(device, arena, slots=1) as (source, pub, sub, net):
        stream, seen = device.stream(), []
        version = publish(source, pub, 1)
        device.captured.append(stream)
        with (
            device.on(stream),
            pytest.raises(shmsync.ProtocolError, match="begin the capture inside a read section"),
            sub.read(),
        ):
            pass
        device.captured.clear()
        with sub.read() as section:
            assert section.version == version
            look_at(device, net, device.current(), seen)
        assert seen == [{1.0}]
