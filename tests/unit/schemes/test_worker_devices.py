"""device= of the schemes: one for all workers, or a list with one for each; each device has one arena, and one copy."""

import multiprocessing

import pytest
import torch

from shmsync.errors import ManifestMismatch
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.conformance.nets import Stamped, stamp
from support.conformance.rigs import PipeRig
from support.devices.simulated import Simulated, installed
from support.processes import segments

SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


@pytest.fixture
def two():
    first, second = Simulated(3, 0.0005), Simulated(4, 0.0005, index=1)
    with installed(first, second):
        yield {first.name: first, second.name: second}


@pytest.fixture
def team():
    """team(scheme, lie, ...) -> a rig whose workers' modules lie at these places."""
    made = []

    def make(scheme, lie, **given):
        made.append(PipeRig(scheme, nets=[Stamped(0).to(place or "cpu") for place in lie], **given))
        return made[-1]

    yield make
    for each in made:
        each.close()


def places_of(rig):
    return [str(net.layer.weight.device) for net in rig.nets]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("source", ["cpu", "simulated:1"])
def test_each_device_has_one_arena_for_all_its_workers(two, team, slots, source):
    places = ["simulated:0", None, "simulated:1", "simulated:0", "cpu"]
    made = team(SharedMemWeightSyncScheme, places, device=places, slots=slots)
    allocated = {name: device.allocated for name, device in two.items()}
    before = set(segments())
    net = Stamped(0).to(source)
    for value in (1, 2, 3):
        made.deliver(stamp(net, value))
        assert made.stamps() == [value] * 5
    assert places_of(made) == ["cpu" if place is None else place for place in places]
    assert {name: device.allocated - allocated[name] for name, device in two.items()} == dict.fromkeys(two, 1)
    assert len(set(segments()) - before) == 3


def test_devices_and_groups_go_together(two, team):
    places = ["simulated:0", None, "simulated:0"]
    made = team(SharedMemWeightSyncScheme, places, device=places, groups=[[0, 1], [2]])
    made.deliver(Stamped(1))
    made.deliver(Stamped(2), [2])
    made.deliver(Stamped(3), [1])  # alone on its device
    assert made.stamps() == [1, 3, 2]
    assert places_of(made) == ["simulated:0", "cpu", "simulated:0"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_list_of_the_wrong_length_is_refused_before_anything_is_made(two, scheme):
    made, (ours, theirs) = scheme(device=["simulated:0", None, "simulated:1"]), multiprocessing.Pipe()
    before = segments()
    with ours, theirs:
        with pytest.raises(ValueError, match=r"\['simulated:0', 'cpu', 'simulated:1'\] is for 3 .* but there are 1"):
            made.init_on_sender("policy", pipes=[ours])
        with pytest.raises(RuntimeError, match="init_on_sender"):
            made.get_sender()
        made.init_on_sender("policy", pipes=[ours] * 3)
        with pytest.raises(ValueError, match="worker 3 has no device.* of 3 workers"):
            made.get_sender().register_worker(3, ours)
        assert made.get_sender().worker_ids == [0, 1, 2]
    assert segments() == before
    made.shutdown()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (["simulated:0", "mps"], ValueError, "cannot lie on 'mps'"),
        ([None, "gpu:7"], ValueError, "'gpu:7', which is no device"),
        ([None, 3], TypeError, "not 3"),
        ({0: "cpu"}, TypeError, r"a list with one for each worker, not \{0: 'cpu'\} \(dict\)"),
        (["cuda:0"], Exception, "CUDA|cuda"),
    ],
)
def test_a_device_where_no_weights_can_lie_is_refused(two, scheme, given, error, words):
    if given == ["cuda:0"] and torch.cuda.is_available():
        pytest.skip("with a GPU, weights can lie on cuda")
    with pytest.raises(error, match=words):
        scheme(device=given)


def test_a_worker_whose_module_lies_elsewhere_is_refused_before_it_receives(two, team):
    scheme = MultiProcessWeightSyncScheme(device=[None, "simulated:1"])
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        scheme.init_on_worker("policy", pipe=theirs, model=Stamped(0), worker_idx=0)
        with pytest.raises(ManifestMismatch, match=r"layer\.weight lies on cpu, but .* device='simulated:1'"):
            scheme.init_on_worker("policy", pipe=theirs, model=Stamped(0), worker_idx=1)
