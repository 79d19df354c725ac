"""Buffers and other private copies on a device: they are renewed in the order of streams, and no thread stands still.

The publisher and the subscriber are in one process, so that a stream can be held up between them.
"""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

import shmsync
from support.devices.on_simulated import held_up
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


def found_in_the_end(device, sub, net, *streams):
    """What lies in the copy when these streams have done everything."""
    for stream in streams:
        stream.record().done.wait()
    seen = []
    with sub.read():
        look_at(device, net, device.current(), seen)
    return seen


@pytest.mark.parametrize("enter", ["read", "refresh"])
@pytest.mark.parametrize("arena", NEAR)
def test_a_new_version_is_entered_while_the_device_is_still_busy(device, arena, enter):
    """A wait for the device would end here only if it reached its deadline: the gate opens after the section."""
    with bound(device, arena) as (source, pub, sub, net):
        stream, seen = device.stream(), []
        version = publish(source, pub, 7)
        with held_up(stream), device.on(stream):
            if enter == "refresh":
                assert sub.refresh()
            with sub.read() as section:
                assert section.version == version
                look_at(device, net, stream, seen)
        stream.record().done.wait()
        assert seen == [{7.0}]


@pytest.mark.parametrize("how", ["read", "refresh", "nested"])
@pytest.mark.parametrize("arena", PLACES)
def test_a_section_on_another_stream_comes_after_the_renewing(device, arena, how):
    with bound(device, arena) as (source, pub, sub, net):
        first, second, seen = device.stream(), device.stream(), []
        for value in range(1, 6):
            publish(source, pub, value)
            with held_up(first), ExitStack() as outer:
                with device.on(first):
                    if how == "refresh":
                        sub.refresh()
                    elif how == "nested":
                        outer.enter_context(sub.read())
                    else:
                        with sub.read():
                            pass
                with device.on(second), sub.read():
                    look_at(device, net, second, seen)
            second.record().done.wait()
            first.record().done.wait()
        assert seen == [{float(value)} for value in range(1, 6)]


@pytest.mark.parametrize("arena", NEAR)
def test_a_later_version_is_copied_after_an_earlier_one(device, arena):
    """Two refreshes on two streams, and no section that would have ordered them."""
    with bound(device, arena) as (source, pub, sub, net):
        first, second = device.stream(), device.stream()
        publish(source, pub, 1)
        with held_up(first):
            with device.on(first):
                sub.refresh()
            publish(source, pub, 2)
            with device.on(second):
                sub.refresh()
        assert found_in_the_end(device, sub, net, first, second) == [{2.0}]


def test_copies_stay_in_order_when_the_publisher_is_started_again(device, name):
    """What the last sections over the old arena still read is not overwritten with the new one's weights."""
    source, net, seen = {"b": torch.ones(4096)}, OneBuffer().to(device.torch_device), []
    first, second = device.stream(), device.stream()
    pub = shmsync.Publisher(source, name=name, device="simulated:0", slots=2)
    with shmsync.Subscriber(name, follow=True, timeout=60.0) as sub:
        sub.bind(net, guard=False)
        session = sub.session
        with held_up(first):
            with device.on(first), sub.read():
                look_at(device, net, first, seen)
            pub.close()
            source["b"].fill_(2)
            with shmsync.Publisher(source, name=name, device="simulated:0", slots=2), device.on(second):
                while sub.session == session:
                    sub.refresh()
                with sub.read():
                    look_at(device, net, second, seen)
                    again = seen.copy()
        second.record().done.wait()
    assert again == []
    assert seen == [{1.0}, {2.0}]


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


def test_a_section_holds_its_slot_until_its_copies_are_made(device):
    """They are read from it by the stream that was current at the entry; the section ends on another one."""
    with bound(device, "simulated:0") as (source, pub, sub, net):
        first, second, seen = device.stream(), device.stream(), []
        publish(source, pub, 1)
        with held_up(first):
            with device.on(first):
                section = sub.read()
                section.__enter__()
            with device.on(second):
                section.__exit__(None, None, None)
            publish(source, pub, 2)  # into the other slot
            with pytest.raises(shmsync.ReaderStalled):
                pub.publish(wait=[], timeout=0.2)
        first.record().done.wait()
        look_at(device, net, device.current(), seen)
        assert seen == [{1.0}]
