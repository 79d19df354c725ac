"""Schemes between a trainer in the host's memory and workers whose modules lie on a GPU."""

import pytest

from shmsync.schemes import SharedMemWeightSyncScheme
from support.conformance.nets import Stamped
from support.conformance.rigs import PipeRig


@pytest.mark.parametrize("slots", [1, 2])
def test_module_on_a_gpu_follows_the_trainer(device, slots, monkeypatch):
    monkeypatch.setattr("support.conformance.rigs.Stamped", lambda value: Stamped(value).to(device))
    made = PipeRig(SharedMemWeightSyncScheme, slots=slots)
    for value in (1, 2, 3):
        made.deliver(Stamped(value))
        assert made.stamps() == [value, value]
        assert {tensor.device.type for net in made.nets for tensor in net.parameters()} == {"cuda"}
    made.close()
