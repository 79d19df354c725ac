"""Schemes between a trainer in the host's memory and workers whose modules lie on a GPU."""

import pytest

from shmsync.schemes import SharedMemWeightSyncScheme
from support.conformance.nets import Stamped
from support.conformance.rigs import CallRig, CallScheme, PipeRig

RIGS = {"shm": (PipeRig, SharedMemWeightSyncScheme, {}), "fan-out": (CallRig, CallScheme, {"fan_out": "node"})}


@pytest.mark.parametrize("rig", RIGS)
@pytest.mark.parametrize("slots", [1, 2])
def test_module_on_a_gpu_follows_the_trainer(device, rig, slots, monkeypatch):
    monkeypatch.setattr("support.conformance.rigs.Stamped", lambda value: Stamped(value).to(device))
    kind, scheme, options = RIGS[rig]
    made = kind(scheme, slots=slots, **options)
    for value in (1, 2, 3):
        made.deliver(Stamped(value))
        assert made.stamps() == [value, value]
        assert {tensor.device.type for net in made.nets for tensor in net.parameters()} == {"cuda"}
    made.close()
