"""Plain TensorDicts that every send of the shared-memory scheme writes too: cheaply, in place, all or nothing."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import shmsync
from shmsync.errors import ManifestMismatch
from support.calls import calls_of
from support.choice import first
from support.conformance.nets import FORMS, Apart, Brief, Deep, Stamped, Tied, numbers, shared, stamp
from support.conformance.table import SHM, in_processes, only

pytestmark = [only(SHM), in_processes]
SLOTS = pytest.mark.parametrize("slots", first([1, 3], 1))


def calls(function):
    """How many functions of Python's this calls, itself included."""
    return sum(event == "call" for event, _ in calls_of(function))


@SLOTS
def test_a_send_calls_nothing_for_each_plain_leaf(fleet, slots):
    least = {}
    for layers in (1, 60):
        model_id = f"policy of {layers}"
        model, plain = Deep(layers), shared(Deep(layers))
        sender = fleet.open(model_id, Deep, layers, policy_weights={model_id: plain}, slots=slots)
        for value in range(2 * slots + 2):
            sender.send(stamp(model, value))  # some first sends make what is kept
        counts = [calls(lambda: sender.send(model)) for _ in range(5)]  # noqa: B023  # a late answer calls more
        least[layers] = min(counts)
        assert numbers(plain) == {float(value)}
    assert least[60] <= least[1] + 10


@SLOTS
def test_every_form_of_weights_reaches_the_plain_tensordict_at_each_send(fleet, slots):
    plain = shared(Stamped(0))
    addresses = [leaf.data_ptr() for leaf in plain.values(True, True)]
    sender = fleet.open(policy_weights={"policy": plain}, slots=slots)
    for value, form in enumerate([form for form in FORMS.values() for _ in range(3)], 1):
        sender.send(form(value))
        assert numbers(plain) == {float(value)}
        assert fleet.stamps() == [value] * 3
    assert [leaf.data_ptr() for leaf in plain.values(True, True)] == addresses


def test_the_plain_tensordict_follows_sends_to_single_groups(fleet):
    plain = shared(Stamped(0))
    sender = fleet.open(policy_weights={"policy": plain}, alone=True)
    for value, workers in ((1, None), (2, 0), (3, [1, 2]), (4, 2), (5, None)):
        sender.send(Stamped(value), workers)
        assert numbers(plain) == {float(value)}
    assert fleet.stamps() == [5] * 3


def test_cast_weights_arrive_as_they_are_sent(fleet):
    plain = shared(Brief(0))
    sender = fleet.open("policy", Brief, policy_weights={"policy": plain}, dtype=torch.bfloat16)
    for value in (1, 2, 3):
        source = stamp(Stamped(), value + 1 / 512)  # bfloat16 has no room for that
        sender.send(source)
        assert plain["layer", "weight"].dtype == torch.bfloat16
        assert numbers(plain) == {float(value)}


def test_a_part_of_the_weights_changes_that_part_of_the_plain_tensordict(fleet):
    plain = shared(Stamped(0))
    sender = fleet.open(policy_weights={"policy": plain}, partial=True)
    sender.send(Stamped(1))
    plain["layer", "bias"].fill_(7)  # the user's own doing: it stays, as nothing is sent there
    for value in (2, 3, 4):
        sender.send({"layer.weight": torch.full((2, 4), float(value))})
        assert plain["layer", "weight"].unique().tolist() == [value]
        assert plain["layer", "bias"].unique().tolist() == [7]
        assert plain["count"].unique().tolist() == [1]
    sender.send(Stamped(5))
    assert numbers(plain) == {5.0}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_tied_leaves_reach_every_plain_leaf_of_theirs(fleet, tied):
    source = Tied(1)
    plain = TensorDict.from_module(source).data.clone()
    if tied:
        plain["tied", "weight"] = plain["layer", "weight"]
    sender = fleet.open("policy", Tied if tied else Apart, policy_weights={"policy": plain})
    for value in (2, 3, 4):
        sender.send(stamp(source, value))
        assert numbers(plain) == {float(value)}
        assert (plain["tied", "weight"].data_ptr() == plain["layer", "weight"].data_ptr()) == tied


def test_plain_leaves_that_are_one_tensor_refuse_two_values(fleet):
    plain = TensorDict.from_module(Tied(0)).data.clone()
    plain["tied", "weight"] = plain["layer", "weight"]
    sender = fleet.open("policy", Apart)
    sender.send(Apart(1))  # the arena has two leaves
    sender.carrier.plain["policy"] = plain
    other = Apart(2)
    with torch.no_grad():
        other.tied.weight.fill_(3)
    with pytest.raises(ManifestMismatch, match="one tensor in the destination"):
        sender.send(other)
    assert numbers(plain) == {0.0} and sender.version == 1


def test_weights_that_lack_a_leaf_change_nothing(fleet):
    plain = shared(Stamped(0))
    sender = fleet.open(policy_weights={"policy": plain})
    with pytest.raises(ManifestMismatch, match=r"layer\.weight"):
        sender.send(Stamped(1, width=9))  # before there is an arena
    assert numbers(plain) == {0.0}
    sender.send(Stamped(1))
    sender.send(Stamped(2))
    weights = Stamped(3).state_dict()
    del weights["layer.bias"]
    version = sender.version
    with pytest.raises(ManifestMismatch, match=r"layer\.bias"):
        sender.send(weights)
    with pytest.raises(ManifestMismatch, match=r"layer\.weight"):
        sender.send(Stamped(3, width=9))
    assert numbers(plain) == {2.0} and fleet.stamps() == [2] * 3 and sender.version == version


def test_a_plain_tensordict_in_read_only_memory_is_refused_before_anything_is_written(fleet):
    with shmsync.Publisher(Stamped(0)) as publisher:
        sender = fleet.open()
        sender.carrier.plain["policy"] = publisher.weights
        for _ in range(2):
            with pytest.raises(ManifestMismatch, match="read-only"):
                sender.send(Stamped(1))
        assert sender.version == 0
        assert fleet.stamps() == [0] * 3


def test_an_expanded_plain_leaf_is_refused_and_nothing_changes(fleet):
    plain = shared(Stamped(0))
    sender = fleet.open(policy_weights={"policy": plain})
    sender.send(Stamped(1))
    sender.send(Stamped(2))
    version = sender.version
    plain.unlock_()["layer", "bias"] = torch.zeros(1).expand(2)
    with pytest.raises(ManifestMismatch, match=r"layer\.bias has several elements in one place"):
        sender.send(Stamped(3))
    assert plain["layer", "weight"].unique().tolist() == [2]
    assert sender.version == version and fleet.stamps() == [2] * 3


@SLOTS
def test_plain_tensors_may_be_replaced_moved_and_laid_out_in_another_way(fleet, slots):
    plain = TensorDict.from_module(Stamped(0)).data.clone()
    sender = fleet.open(policy_weights={"policy": plain}, slots=slots)
    module, value = Stamped(0), 0

    def sends():
        nonlocal value
        for _ in range(slots + 1):
            value += 1
            sender.send(stamp(module, value))
            assert numbers(plain) == {float(value)}
            assert fleet.stamps() == [value] * 3

    sends()
    old = plain["layer", "weight"]
    plain["layer", "weight"] = torch.zeros(2, 4)
    sends()
    assert old.unique().tolist() == [slots + 1]  # no send writes it any more
    plain["layer", "weight"].data = torch.zeros(2, 4)
    sends()
    plain["layer", "weight"] = torch.zeros(4, 2).t()
    sends()
    plain["layer", "weight"] = torch.zeros(2, 4)
    sends()
    with torch.inference_mode():
        plain["layer", "weight"] = torch.zeros(2, 4)
    with torch.inference_mode():
        sends()


def test_a_write_into_a_plain_tensor_counts_as_one_for_autograd(fleet):
    plain = TensorDict.from_module(Stamped(0)).data.clone()
    sender = fleet.open(policy_weights={"policy": plain})
    for value in (1, 2, 3):
        before = plain["layer", "weight"]._version
        sender.send(Stamped(value))
        assert plain["layer", "weight"]._version > before
