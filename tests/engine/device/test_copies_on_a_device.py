"""The copies of a publish on a device: their order, how long their sources are kept, and which go together."""

import time

import pytest
import torch

from support.devices.simulated import value

MADE = {
    "as it is": lambda device, tensor: tensor,
    "cast": lambda device, tensor: tensor.double(),
    "strided": lambda device, tensor: tensor.repeat(2, 1).t()[:, 0],
    "of another device": lambda device, tensor: tensor.to("simulated:1"),
}


@pytest.mark.parametrize(("how", "slots"), zip(MADE, [1, 2, 1, 2], strict=True))
def test_after_orders_what_another_stream_makes(arena, device, slots, how):
    there = MADE[how](device, device.tensor(torch.full((1000,), 1.0)))
    pub, sub = arena({"t": torch.ones(1000)}, slots, dtype={"*": torch.float32})
    gathering, trainers = device.stream(), device.stream()
    for version in range(2, 30):
        gathering.give(lambda: time.sleep(0.002))
        gathering.give(lambda version=version: there[500:].fill_(version))
        gathering.give(lambda version=version: there[:500].fill_(version))
        after = gathering if version % 2 else gathering.record()
        with device.on(trainers):
            pub.publish({"t": there}, after=after, wait=[])
        assert value(sub) == (version, float(version))
    with pytest.raises(TypeError, match="a stream or an event"):
        pub.publish({"t": there}, after=3)
    assert pub.publish({"t": there}, wait=[]) == version + 1


@pytest.mark.parametrize(("order", "slots"), [("stream", 2), ("event", 1)])
def test_memory_that_another_stream_uses_again_is_copied_before(arena, device, slots, order):
    pub, sub = arena({"t": torch.ones(1000)}, slots)
    gathering, trainers, reused = device.stream(), device.stream(), 0
    for version in range(2, 30):
        with device.on(gathering):
            there = torch.full((1000,), float(version), device="simulated:0")
            after = gathering if order == "stream" else gathering.record()
        address = there.data_ptr()
        with device.on(trainers):
            device.kernel(lambda: time.sleep(0.001))
            pub.publish({"t": there}, after=after)
        del there
        with device.on(gathering):
            again = torch.full((1000,), -1.0, device="simulated:0")
        reused += again.data_ptr() == address
        sub.wait_version(version)
        assert value(sub) == (version, float(version))
        del again
    assert order == "event" or reused > 0
