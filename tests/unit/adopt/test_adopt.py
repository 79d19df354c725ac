"""adopt(): the trainer's parameters are the slab."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync


def test_adopt_publishes_first_what_differs(publisher, subscriber):
    pub = publisher(nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    pub.adopt(other)
    assert pub.version == 2
    assert torch.equal(subscriber(pub).weights["weight"], other.weight)


# ---- adopt


def test_adopting_never_casts_the_trainers_parameters(publisher):
    module = nn.Linear(2, 2)
    pub = publisher(module, dtype=torch.bfloat16)
    with pytest.raises(shmsync.ManifestMismatch, match="cast"):
        pub.adopt(module)
    assert module.weight.dtype == torch.float32


def test_a_write_outside_update_is_warned_of_once(adopted):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    pub, _ = adopted(module, optimizer)
    module(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)  # changes no parameter
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        module.load_state_dict(nn.Linear(2, 2).state_dict())
        with pub.update(), torch.no_grad():
            module.weight.clamp_(-1, 1)
        pub.publish()

    def decay_by_hand():
        for _ in range(2):  # each update() looks at one of the two parameters
            with torch.no_grad():
                module.weight.mul_(0.5)
            optimizer.step()

    with pytest.warns(UserWarning, match="weight of the adopted module was written outside"):
        decay_by_hand()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        module.bias.mul_(0.5)
        optimizer.step()


# ---- load_state_dict()


def doubled(module):
    return {name: tensor * 2 + 1 for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(("part", "assign"), [("", False), ("0", True)])
def test_loading_is_a_version_or_joins_the_update_of_its_thread(adopted, part, assign):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.empty = nn.ParameterList([torch.empty(0, 3), torch.empty(0, 5)])
    pub, sub = adopted(module)
    target = module.get_submodule(part)
    for version, joins in ((2, False), (3, True), (4, False)):
        state = doubled(target)
        with pub.update() if joins else contextlib.nullcontext():
            target.load_state_dict(state, assign=assign)
        assert pub.version == version
        assert all(torch.equal(state[name], tensor) for name, tensor in target.state_dict().items())
        shown = sub.snapshot().weights
        assert all(torch.equal(shown[tuple(name.split("."))], t) for name, t in module.state_dict().items())
    pub.close()
    assert "load_state_dict" not in vars(module) and "_load_from_state_dict" not in vars(target)
    target.load_state_dict(doubled(target))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("wrong", ["a shape", "a missing key", "a key too many"])
def test_a_load_that_raises_changes_nothing(adopted, wrong, assign):
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    pub, sub = adopted(module)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = doubled(module)
    if wrong == "a missing key":
        del state["1.bias"]
    else:
        state["1.bias" if wrong == "a shape" else "2.bias"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="Error.* in loading state_dict"):
        module.load_state_dict(state, assign=assign)
    assert pub.version == 1 and sub.snapshot().version == 1
    pub.publish()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(torch.equal(before[name], tensor) for name, tensor in sub.state_dict().items())
    module.load_state_dict(doubled(module))
    assert pub.version == 3 and torch.equal(sub.snapshot().weights["1", "weight"], module[1].weight)


def test_no_reader_sees_what_a_load_that_raises_has_written(adopted, subscriber):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pub, _ = adopted(module)
    sub = subscriber(pub, consistency="optimistic")
    seen, state = [], doubled(module)
    del state["1.bias"]
    module[1].register_load_state_dict_pre_hook(lambda *_: seen.append(sub.weights["0.weight"].clone()))
    before = module[0].weight.detach().clone()
    with sub.read() as section, pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(state)
    assert section.torn or torch.equal(seen[0], before)


def test_other_weights_are_not_published_over_an_adopted_module(adopted):
    module = nn.Linear(2, 2)
    pub, _ = adopted(module)
    average = torch.optim.swa_utils.AveragedModel(module)
    before = module.weight.detach().clone()
    with torch.no_grad():
        average.module.weight.fill_(7)
    for other in (average, average.module.state_dict(), {"weight": torch.zeros(2, 2)}):
        with pytest.raises(shmsync.ProtocolError, match="make a Publisher for"):
            pub.publish(other)
    assert torch.equal(module.weight, before) and pub.version == 1
    assert pub.publish(module) == 2


def test_a_tensordict_is_adopted(publisher, subscriber):
    weights = TensorDict({"actor": {"weight": torch.zeros(2, 2)}, "scale": torch.zeros(3)})
    pub = publisher(weights)
    pub.adopt(weights)
    sub = subscriber(pub)
    with pub.update():
        weights["actor", "weight"].fill_(3)
    weights["scale"] = torch.ones(3)
    assert pub.publish() == 3
    assert sub.weights["actor", "weight"].eq(3).all() and sub.weights["scale"].eq(1).all()
    weights["scale"].fill_(5)
    assert sub.weights["scale"].eq(5).all()  # it is the slab again


def test_an_embedding_that_writes_in_its_forward_is_refused(publisher):
    module = nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))
    address = module[0].weight.data_ptr()
    pub = publisher(module)
    with pytest.raises(shmsync.ProtocolError, match="0 is an embedding with max_norm=1.0"):
        pub.adopt(module)
    assert module[0].weight.data_ptr() == address and pub.version == 1


def test_adopt_needs_one_slot(publisher):
    pub = publisher(nn.Linear(2, 2), slots=2)
    with pytest.raises(ValueError, match="publish"):
        pub.adopt(nn.Linear(2, 2))


@pytest.mark.parametrize("assign", [False, True])
def test_a_load_after_an_update_that_failed_is_what_the_next_publish_takes(adopted, assign):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    pub, sub = adopted(module)
    good = {key: torch.full_like(tensor, 3) for key, tensor in pub.state_dict().items()}
    with contextlib.suppress(ZeroDivisionError), pub.update() as weights:
        weights["0", "weight"].fill_(-1)
        raise ZeroDivisionError
    module.load_state_dict(good, assign=assign)
    assert pub.version == 1
    with pytest.raises(shmsync.Poisoned, match="load good weights into it before"), pub.update():
        pass
    assert pub.publish() == 2
    assert all(torch.equal(leaf, good[name]) for name, leaf in sub.state_dict().items())
    with pub.update() as weights:
        weights["0", "weight"].fill_(5)
    assert (module[0].weight == 5).all()
