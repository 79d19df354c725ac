"""A signal handler that raises while a section over a device is left: the device still gets its reads.

Otherwise the slot would be held for as long as the worker lives, or a private copy be overwritten that is still read.
"""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import nn

import shmsync
from support.devices.simulated import everywhere
from support.faults.interrupts import Interrupt, interrupt_at

STEPS = (  # in which it is interrupted
    "_reads_end", "_copies_read", "_use_copies", "end", "note", "use", "renewing", "follow", "call", "give", "record",
)  # fmt: skip


@pytest.fixture
def device():
    with everywhere(seed=9, longest=0.0005) as device:
        yield device


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
@pytest.mark.parametrize("way", ["section", "nested", "guarded call", "run", "refresh"])
def test_interrupted_at_every_line_of_the_end_of_a_section(device, way, consistency, slots):
    with (
        shmsync.Publisher({"w": torch.zeros(8)}, slots=slots, timeout=20.0) as pub,
        shmsync.Subscriber(pub.handle, worker=0, timeout=20.0, consistency=consistency) as sub,
    ):
        module = sub.bind(nn.ParameterDict({"w": zeros(device)}), guard=False)
        guarded = sub.bind(Doubled(device))

        def nested():
            with sub.read(), sub.read():
                pass

        def section():
            with sub.read():
                pass

        ways = {
            "section": section,
            "nested": nested,
            "guarded call": guarded,
            "run": lambda: sub.run(lambda: None),
            "refresh": sub.refresh,
        }
        ways[way]()
        for line in count():
            version = pub.publish({"w": torch.full((8,), float(line))}, wait=[])
            with interrupt_at(line, lambda code: code.co_name in STEPS) as raised:
                try:
                    ways[way]()
                except Interrupt:
                    assert raised
                else:
                    assert not raised, "the interrupt was lost"
            for _ in range(slots):  # each slot can be written, and what was interrupted can be done
                version = pub.publish(wait=[], timeout=20.0)
            ways[way]()
            with sub.read() as inside:
                assert inside.version == version
                assert set(module["w"].tolist()) == {0.0}
            assert pub.readers()[0].pinned is None
            pub.publish({"w": torch.zeros(8)}, wait=[])
            if not raised:
                break
        assert line > (10 if way != "refresh" or consistency == "pinned" else 0)


def zeros(device):
    return nn.Parameter(torch.zeros(8, device=device.torch_device), requires_grad=False)


class Doubled(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.w = zeros(device)

    def forward(self):
        return self.w * 2
