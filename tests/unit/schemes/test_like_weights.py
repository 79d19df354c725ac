"""SharedMem knows a TensorDict or dict by one like it that was sent: what it looks at again, and what it refuses."""

from __future__ import annotations

import re
from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict

import shmsync
from shmsync.engine.write.writer import Writer
from support.calls import Call
from support.conformance.nets import Stamped
from support.conformance.rigs import rigs


def tensordict(value):
    return TensorDict.from_module(Stamped(value)).data.clone()


FORMS = {
    "tensordict": tensordict,
    "flat tensordict": lambda value: TensorDict(Stamped(value).state_dict()),
    "locked tensordict": lambda value: tensordict(value).lock_(),
    "dict": lambda value: dict(Stamped(value).state_dict()),
    "state_dict": lambda value: Stamped(value).state_dict(),
    "nested dict": lambda value: tensordict(value).to_dict(),
    "ordered dict": lambda value: OrderedDict(Stamped(value).state_dict()),
}
RECOGNISED = [form for form in FORMS if form != "flat tensordict"]


@pytest.fixture
def open_rig():
    with rigs("shm", {}) as make:
        yield make


@pytest.fixture
def found(monkeypatch):
    """What publish_like() has returned, call by call."""
    answers, publish = [], Writer.publish_like

    def like(self, weights, deadline):
        answers.append(publish(self, weights, deadline))
        return answers[-1]

    monkeypatch.setattr(Writer, "publish_like", like)
    return answers


def send(rig, weights):
    return rig.receive_until(Call(rig.sender.send, weights, timeout=60))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"slots": 3}], ids=str)
def test_each_form_arrives_again_and_again(open_rig, found, form, options):
    rig = open_rig(**options, nets=[Stamped(0).to(options.get("dtype")) for _ in range(2)])
    for value in range(1, 6):
        assert send(rig, FORMS[form](value)) == value
        assert rig.stamps() == [value] * 2
    assert (found[-2:] == [4, 5]) == (form in RECOGNISED)


def lacking(weights):
    del weights["layer.weight"]


def extra(weights):
    weights["other"] = torch.zeros(2)


def other_dtype(weights):
    weights["count"] = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize("change", [lacking, extra, other_dtype])
def test_one_that_is_not_like_it_is_refused_as_a_first_one_is(open_rig, found, change):
    rig = open_rig()
    for value in (1, 2, 3):
        send(rig, FORMS["dict"](value))
    wrong = FORMS["dict"](9)
    change(wrong)
    for _ in range(2):  # what was refused is known by then, too
        with pytest.raises(shmsync.ManifestMismatch) as refused:
            send(rig, wrong)
        assert found[-1] is None
    fresh = open_rig()
    send(fresh, FORMS["dict"](1))
    with pytest.raises(shmsync.ManifestMismatch) as at_first:
        fresh.sender.send_async(wrong)
    assert re.sub(r"arena '[^']*'", "", str(refused.value)) == re.sub(r"arena '[^']*'", "", str(at_first.value))
    assert rig.stamps() == [3] * 2
    assert send(rig, FORMS["dict"](4)) == 4
    assert rig.stamps() == [4] * 2


@pytest.mark.parametrize("own", [True, False])
def test_a_registered_tensordict_shows_what_was_sent(open_rig, found, own):
    rig = open_rig()
    plain = tensordict(0).share_memory_()
    rig.scheme.register_shared_weights("policy", plain)
    rig.receive()
    for value in range(1, 5):
        if own:
            for leaf in plain.values(True, True):
                leaf.fill_(value)
        send(rig, plain if own else tensordict(value))
        assert rig.stamps() == [value] * 2
        assert all((leaf == value).all() for leaf in plain.values(True, True))
    assert found[-1] is not None
