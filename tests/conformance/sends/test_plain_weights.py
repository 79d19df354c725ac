"""Plain TensorDicts that every send of the shared-memory scheme writes too: cheaply, in place, all or nothing."""

from __future__ import annotations

import pytest
import torch

from shmsync.errors import ManifestMismatch
from support.conformance.nets import FORMS, Stamped, numbers, shared
from support.conformance.table import SHM, only

pytestmark = only(SHM)
SLOTS = pytest.mark.parametrize("slots", [1, 3])


@SLOTS
def test_every_form_of_weights_reaches_the_plain_tensordict_at_each_send(fleet, slots):
    plain = shared(Stamped(0))
    sender = fleet.open(policy_weights={"policy": plain}, slots=slots)
    for value, form in enumerate([form for form in FORMS.values() for _ in range(3)], 1):
        sender.send(form(value))
        assert numbers(plain) == {float(value)}
        assert fleet.stamps() == [value] * 3


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


def test_a_registered_tensordict_shows_values_in_its_own_dtype(fleet):
    plain = shared(Stamped(0))
    sender = fleet.open("policy", Stamped, 0, policy_weights={"policy": plain}, dtype=torch.float64, timeout=60)
    with pytest.raises(ManifestMismatch):  # the workers' modules have another dtype
        sender.send(Stamped(2))
    assert numbers(plain) == {2.0} and plain["layer", "weight"].dtype == torch.float32


def test_a_send_to_no_worker_writes_nothing(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    assert sender.send(Stamped(2), []) == 1
    assert fleet.stamps() == [1] * 3
