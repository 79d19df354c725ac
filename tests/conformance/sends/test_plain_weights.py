"""Plain TensorDicts that every send of the shared-memory scheme writes too: cheaply, in place, all or nothing."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from shmsync.errors import ManifestMismatch
from support.conformance.nets import FORMS, Stamped, numbers, shared, stamp
from support.conformance.table import SHM, only

pytestmark = only(SHM)
SLOTS = pytest.mark.parametrize("slots", [1, 3])


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
