"""WeightStrategy: the forms in which weights travel, and what is refused."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmsync.errors import ManifestMismatch
from shmsync.schemes import WeightStrategy
from support.conformance.nets import FORMS, Stamped, Tied, ask

KEYS = ["count", "layer.bias", "layer.weight"]
FLAT = {"flat tensordict": lambda value: TensorDict(Stamped(value).state_dict())}


def flat(weights):
    """{dotted key: tensor}, whatever the form."""
    if isinstance(weights, nn.Module):
        return weights.state_dict()
    return dict(TensorDict(weights).flatten_keys(".").items())


def numbers(weights):
    return {float(value) for leaf in flat(weights).values() for value in leaf.view(-1)}


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
def test_extracts_its_form_from_each(form, source):
    weights = WeightStrategy(form).extract_weights(FORMS[source](3))
    assert isinstance(weights, TensorDict if form == "tensordict" else dict)
    nested = form == "tensordict" or source == "nested dict"  # a dict is a state_dict already
    assert sorted(weights.keys(), key=str) == (["count", "layer"] if nested else KEYS)
    assert sorted(flat(weights)) == KEYS
    assert numbers(weights) == {3.0}


@pytest.mark.parametrize("destination", [*FORMS, *FLAT])
def test_applies_the_form_that_the_weights_have(destination):
    kinds = FORMS | FLAT
    into = kinds[destination](0)
    for value, weights in enumerate(["state_dict", "tensordict", "nested dict", "flat tensordict"], 4):
        WeightStrategy("tensordict").apply_weights(into, kinds[weights](value))
        assert numbers(into) == {float(value)}, weights


def test_applying_writes_in_place_and_ties_and_buffers_survive():
    net = Tied(1)
    weight, address, count = net.layer.weight, net.layer.weight.data_ptr(), net.count
    WeightStrategy().apply_weights(net, Tied(2).state_dict())
    assert net.layer.weight is net.tied.weight is weight and weight.data_ptr() == address
    assert weight.unique().tolist() == [2]
    assert net.count is count and count.tolist() == [2, 2, 2]
    assert sorted(dict(net.named_buffers())) == ["cache", "count"]
    assert net.cache.tolist() == [1, 1]  # a state_dict has no such buffer


def test_extracting_from_another_type_is_a_value_error():
    for source in (5, "policy", [torch.zeros(2)], torch.zeros(2)):
        with pytest.raises(ValueError, match=type(source).__name__):
            WeightStrategy().extract_weights(source)


@pytest.mark.parametrize("destination", [*FORMS, *FLAT])
def test_refusal_lists_every_problem_and_nothing_was_written(destination):
    weights = Stamped(2, width=5).state_dict()  # layer.weight is mismatched in shape
    weights["count"] = weights["count"].to(torch.int32)  # count in dtype
    weights["more.bias"] = weights.pop("layer.bias")
    into = (FORMS | FLAT)[destination](1)
    with pytest.raises(ManifestMismatch) as refused:
        WeightStrategy().apply_weights(into, weights)
    assert isinstance(refused.value, ValueError)
    assert "missing: layer.bias" in str(refused.value)
    assert "unexpected: more.bias" in str(refused.value)
    assert "mismatched: count is torch.int64 (3,) in the destination but torch.int32 (3,)" in str(refused.value)
    assert "mismatched: layer.weight is torch.float32 (2, 4) in the destination but" in str(refused.value)
    assert numbers(into) == {1.0}


def test_one_name_of_a_tied_parameter_is_enough():
    net, weights = Tied(1), Tied(2).state_dict()
    del weights["tied.weight"]
    WeightStrategy().apply_weights(net, weights)
    assert net.tied.weight.unique().tolist() == [2]


def test_tied_parameters_that_differ_in_the_weights_are_refused():
    net, weights = Tied(1), Tied(2).state_dict()
    weights["tied.weight"] = torch.full((2, 2), 3.0)
    with pytest.raises(ManifestMismatch, match="are one tensor in the destination but differ"):
        WeightStrategy().apply_weights(net, weights)
    assert ask(net) == 1
