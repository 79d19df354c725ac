"""Large weights of MultiProcess lie in sealed memory beside the message; every promise of a send stays as it is."""

import gc
from pathlib import Path

import pytest

from shmsync.errors import AckTimeout, WorkerDied, WriterDied
from shmsync.schemes import MultiProcessWeightSyncScheme
from support.calls import Call, naming
from support.conformance.nets import Stamped
from support.conformance.rigs import PipeRig
from support.conformance.table import MP, only
from support.processes import descriptors, until


def sealed_here(state=None):
    """Of sealed weights: how many descriptors this process has, and how many mappings."""
    gc.collect()
    places = descriptors().values(), Path("/proc/self/maps").read_text().splitlines()
    return tuple(sum("shmsync-weights" in each for each in place) for place in places)


WIDE = 1 << 19  # 4 MB of weights


def large(value):
    return Stamped(value, WIDE)


@pytest.fixture(autouse=True)
def earlier_weights_are_gone():
    """They are counted for the whole process, and a thread of an earlier test may still be letting some go."""
    until(lambda: sealed_here() == (0, 0))


@pytest.fixture
def rig(rig_of):
    return rig_of(PipeRig, MultiProcessWeightSyncScheme, nets=[large(0), large(0)])


def deliver(rig, weights):
    """Send while every worker receives: a pipe does not take all of it at once."""
    return rig.receive_until(Call(rig.sender.send, weights, timeout=60))


def test_workers_that_can_open_them_get_them_beside_the_message(rig):
    for value in (1, 2, 3):
        deliver(rig, large(value))
        assert rig.stamps() == [value] * 2
        assert sealed_here() == ((0, 0) if value == 1 else (1, 0))  # the first send meets its workers
    rig.nets[0].layer.weight.data.add_(1)  # private copies
    assert rig.stamps()[1] == 3


def test_late_worker_applies_what_it_was_sent_and_holds_up_one(rig):
    deliver(rig, large(1))
    for value in (2, 3, 4, 5):
        rig.sender.send_async(large(value))
        rig.receivers[0].receive(timeout=0.05)
        with naming(AckTimeout, [1]):
            rig.sender.wait_async(timeout=0.05)
        assert sealed_here()[0] <= 2  # the newest, and the one that the late worker may still open
    deliver(rig, large(6))
    assert rig.stamps() == [6, 6]
    deliver(rig, large(7))
    assert rig.stamps() == [7, 7]
    assert sealed_here() == (1, 0)


def test_weights_that_are_gone_are_refused_by_name(rig):
    for value in (1, 2):
        deliver(rig, large(value))
    rig.sender.send_async(large(3))
    (_, message) = rig.sender._in_use[0]
    message.sealed.close()  # as the death of the sender does
    rig.receive()
    with pytest.raises(WriterDied, match="given these weights up"):
        rig.sender.wait_async(timeout=60)
    assert rig.stamps() == [2, 2]
    deliver(rig, large(4))
    assert rig.stamps() == [4, 4]


# ---- with real workers


def sealed_there(fleet):
    return [worker.call(sealed_here) for worker in fleet.workers]


@only(MP)
def test_real_workers_and_their_deaths(fleet):
    sender = fleet.open("policy", Stamped, 0, WIDE, timeout=60)
    for value in (1, 2, 3):
        sender.send(large(value))
        assert fleet.stamps() == [value] * 3
    assert sealed_here() == (1, 0)
    assert sealed_there(fleet) == [(0, 0)] * 3
    fleet.hold(1)
    sender.send_async(large(4))
    fleet.workers[1].kill()
    with naming(WorkerDied, [1]):
        sender.wait_async()
    assert fleet.stamps(workers=[0, 2]) == [4, 4]
    sender.send(large(5))
    assert fleet.stamps(workers=[0, 2]) == [5, 5]
    assert sealed_here() == (1, 0)
    fleet.replace(1)
    fleet.join(1, fleet.schemes[0], "policy", Stamped, 0, WIDE)
    fleet.register(sender, 1)
    for value in (6, 7):
        sender.send(large(value))
        assert fleet.stamps() == [value] * 3
    assert sealed_there(fleet) == [(0, 0)] * 3
    assert sealed_here() == (1, 0)
