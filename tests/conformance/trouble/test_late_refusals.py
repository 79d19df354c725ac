"""partial=True through pipes: a part that a worker refuses, in time or after the deadline, is not brought again."""

import pytest
import torch

from shmsync.errors import AckTimeout, ManifestMismatch
from shmsync.schemes import MultiProcessWeightSyncScheme
from support.calls import Call
from support.conformance.nets import Stamped, ask, held, leaf
from support.conformance.rigs import PipeRig

WRONG = {"other": torch.zeros(2)}


@pytest.fixture
def rig(rig_of):
    return rig_of(PipeRig, MultiProcessWeightSyncScheme, partial=True)


def send_late(rig, weights):
    """A send that no worker answers in time."""
    rig.sender.send_async(weights)
    with pytest.raises(AckTimeout):
        rig.sender.wait_async(timeout=0.01)


def test_part_that_is_refused_late_is_brought_to_nobody_new(rig):
    rig.deliver(Stamped(1))
    send_late(rig, {**WRONG, **leaf(7, "count")})
    rig.receive()
    late = rig.join(Stamped(0))
    rig.deliver(leaf(2))
    assert held(late) == held(rig.nets[0]) == {"layer.weight": 1, "layer.bias": 2, "count": 1}


def test_late_refusal_before_a_resend(rig):
    rig.deliver(Stamped(1))
    send_late(rig, WRONG)
    rig.receive()
    late = rig.join(Stamped(0))
    rig.receive_until(Call(rig.sender.resend, 2, timeout=60), [2])
    assert ask(late) == 1


def test_newer_part_outlives_the_refusal_of_an_older_one_that_came_with_it(rig):
    rig.deliver(Stamped(1))
    send_late(rig, WRONG)
    with pytest.raises(ManifestMismatch):  # its message held both
        rig.deliver(leaf(2))
    rig.deliver(leaf(3, "count"))
    assert [held(net) for net in rig.nets] == [{"layer.weight": 1, "layer.bias": 2, "count": 3}] * 2


def test_part_that_one_has_and_another_refuses_late_is_for_new_workers_too(rig):
    rig.deliver(Stamped(1))
    rig.nets[1] = rig.workers[1].get_receiver()._model_ref = Stamped(1, width=7)  # a model that has changed
    send_late(rig, leaf(2, "layer.weight"))
    rig.receive()
    late = rig.join(Stamped(0))
    rig.deliver(leaf(3))
    assert held(late) == held(rig.nets[0]) == {"layer.weight": 2, "layer.bias": 3, "count": 1}
    assert held(rig.nets[1]) == {"layer.weight": 1, "layer.bias": 3, "count": 1}


def test_part_that_came_late_is_not_brought_twice(rig):
    rig.deliver(Stamped(1))
    send_late(rig, leaf(2))
    rig.receive()
    with torch.no_grad():
        for net in rig.nets:
            net.layer.bias.fill_(9)  # the worker's own change, which another bringing would undo
    rig.deliver(leaf(3, "count"))
    assert [held(net) for net in rig.nets] == [{"layer.weight": 1, "layer.bias": 9, "count": 3}] * 2


def test_refusals_of_several_late_parts(rig):
    rig.deliver(Stamped(1))
    send_late(rig, WRONG)
    send_late(rig, leaf(2))
    send_late(rig, {"another": torch.zeros(1)})
    rig.receive()
    rig.deliver(leaf(3, "count"))
    assert [held(net) for net in rig.nets] == [{"layer.weight": 1, "layer.bias": 2, "count": 3}] * 2
