"""Where the arenas of the adapter lie: on each worker's device one, by device= or by where the policies are."""

import pytest
from torch import nn

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.devices.simulated import Simulated, installed
from support.processes import segments
from support.torchrl.pair import net
from support.weights import fill as filled


@pytest.fixture
def two():
    first, second = Simulated(3, 0.0005), Simulated(4, 0.0005, index=1)
    with installed(first, second):
        yield {first.name: first, second.name: second}


def places(made, name="0.weight"):
    return [str(dict(own.named_parameters())[name].device) for own in made.models]


def values(made):
    return [set(own[0].weight.flatten().tolist()) for own in made.models]


def start(model, where):
    return {"model": model, "devices": where}


@pytest.mark.parametrize("slots", [1, 2])
def test_each_device_of_the_policies_has_one_arena(two, pair, slots):
    model = filled(net(), 1.0)
    where = ["simulated:0", None, "simulated:1", "simulated:0"]
    before, allocated = set(segments()), {name: device.allocated for name, device in two.items()}
    made = pair(model, 4, start=start(model, where), lie=where, slots=slots)
    assert len(set(segments()) - before) == 3
    assert {name: device.allocated - allocated[name] for name, device in two.items()} == dict.fromkeys(two, 1)
    for value in (2.0, 3.0):
        made.sender.send(filled(model, value))
        assert values(made) == [{value}] * 4
    assert places(made) == ["simulated:0", "cpu", "simulated:1", "simulated:0"]


def test_device_of_the_scheme_wins_over_that_of_the_policies(two, pair):
    model = filled(net(), 1.0)
    made = pair(model, 2, start=start(model, [None, None]), lie=["simulated:1", None], device=["simulated:1", None])
    made.sender.send(filled(model, 2.0))
    assert (values(made), places(made)) == ([{2.0}] * 2, ["simulated:1", "cpu"])


def test_what_cannot_be_is_refused_before_anything_is_made(two):
    before = segments()
    with pytest.raises(ValueError, match=r"device=\['simulated:0'\] is for 1 workers, but there are 2"):
        ShmWeightSyncScheme(device=["simulated:0"]).init_on_sender(
            model_id="policy", model=nn.Linear(2, 2), devices=[None, None]
        )
    with pytest.raises(ValueError, match="'nowhere', which is no device"):
        ShmWeightSyncScheme(device="nowhere")
    with pytest.raises(TypeError, match="not 3"):
        ShmWeightSyncScheme(device=[3])
    assert segments() == before
