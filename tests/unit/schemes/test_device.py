"""device= of the scheme in shared memory: one arena on the device, whatever the workers' modules lie on."""

import pytest

from shmsync.schemes import SharedMemWeightSyncScheme
from support.calls import Call
from support.conformance.nets import Stamped, stamp
from support.conformance.rigs import PipeRig
from support.devices.simulated import Simulated, installed


@pytest.fixture
def device():
    made = Simulated(3, 0.0005)
    with installed(made):
        yield made


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("source", ["cpu", "simulated:0"])
def test_workers_on_the_device_share_one_arena_and_others_have_copies(device, slots, source):
    allocated = device.allocated
    nets = [Stamped(0).to(place) for place in ("simulated:0", "cpu", "simulated:0")]
    made = PipeRig(SharedMemWeightSyncScheme, nets=nets, device="simulated:0", slots=slots)
    net = Stamped(0).to(source)
    for value in (1, 2, 3):
        made.deliver(stamp(net, value))
        assert made.stamps() == [value] * 3
    assert [str(each.layer.weight.device) for each in nets] == ["simulated:0", "cpu", "simulated:0"]
    assert device.allocated - allocated == 1
    made.close()


@pytest.mark.parametrize("slots", [1, 2])
def test_an_update_returns_when_the_workers_use_what_was_written(device, slots):
    nets = [Stamped(0).to("simulated:0"), Stamped(0)]
    made = PipeRig(SharedMemWeightSyncScheme, nets=nets, device="simulated:0", slots=slots, given={"model": Stamped(1)})
    made.deliver()

    def update():
        with made.sender.update(timeout=60) as weights:
            for key in ("weight", "bias"):
                weights["layer", key].fill_(5)
            weights["count"].fill_(5)

    made.receive_until(Call(update))
    assert made.stamps() == [5, 5] and [receiver.version for receiver in made.receivers] == [2, 2]
    made.close()


@pytest.mark.parametrize(("given", "error"), [("mps", ValueError), ("gpu:7", ValueError), (3, TypeError)])
def test_a_device_where_no_weights_can_lie_is_refused(given, error):
    with pytest.raises(error, match="device is None or 'cpu'"):
        SharedMemWeightSyncScheme(device=given)
