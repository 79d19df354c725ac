"""sender.verify(), over every scheme: the workers prove what they hold, and an error names those that do not."""

import time

import pytest

from shmsync.errors import AckTimeout, NotDelivered, ProtocolError, WorkerDied
from support.calls import naming
from support.conformance import damages, peers
from support.conformance.nets import Stamped, Tied, stamp
from support.conformance.table import PIPES, in_processes, over_pipes
from support.processes import until

pytestmark = in_processes  # how a worker was started does not matter here: see test_send.py
LEAVES = len(Stamped().state_dict())
DAMAGES_OF_TWO = list(zip(list(damages.DAMAGES)[::2], list(damages.DAMAGES)[1::2], strict=True))  # workers


def test_what_was_sent_is_proved(fleet):
    sender = fleet.open(checksum=True)
    for value in (1, 2, 3):
        version = sender.send(Stamped(value))
        proof = sender.verify()
        assert (proof.version, proof.leaves, sorted(proof.workers)) == (version, LEAVES, [0, 1, 2])
    assert fleet.stamps() == [3, 3, 3]


@pytest.mark.parametrize("two", DAMAGES_OF_TWO, ids=lambda two: f"{two[0].__name__}-{two[1].__name__}")
def test_workers_that_hold_something_else_are_named(fleet, two):
    sender = fleet.open("policy", Tied, checksum=True)
    sender.send(Tied(5))
    sender.verify()
    for index, damage in enumerate(two, 1):
        fleet.workers[index].call(damage)
        with naming(NotDelivered, [index]) as error:
            sender.verify([0, index])
        for leaf in damages.DAMAGES[damage]:
            assert leaf in str(error.value)
    with naming(NotDelivered, [1, 2]) as error:
        sender.verify()
    if fleet.entry in PIPES:
        assert damages.DAMAGES[two[0]] | damages.DAMAGES[two[1]] <= set(error.value.leaves)
    assert sorted(sender.verify([0]).workers) == [0]


@over_pipes
def test_a_leaf_that_nobody_sends(fleet):
    sender = fleet.open(checksum=True)
    sender.send(Stamped(1))
    fleet.workers[2].call(damages.add_leaf)
    if fleet.entry.name.startswith("mp"):
        with pytest.raises(NotDelivered, match=r"extra.weight was never sent; extra.bias was never sent"):
            sender.verify()
    else:
        sender.verify()  # the arena's own verify() lists it: Proof.unsent


@over_pipes
def test_another_model_in_the_place_of_the_one_that_had_the_weights(fleet):
    scheme = fleet.make(checksum=True)
    fleet.init_sender(scheme)
    for worker in fleet.workers:
        worker.call(peers.join_with_context, scheme, "policy", Stamped)
    sender = scheme.get_sender()
    sender.send(Stamped(1))
    assert sender.verify().leaves == LEAVES
    fleet.workers[0].call(damages.swap_in_context)
    with naming(NotDelivered, [0], match="layer.weight"):
        sender.verify()
    sender.send(Stamped(2))  # which still goes into the old one
    with pytest.raises(NotDelivered, match="layer.weight"):
        sender.verify()


def test_each_worker_proves_what_it_was_sent(fleet):
    sender = fleet.open(alone=True, checksum=True)
    sender.send(Stamped(1))
    sender.send(Stamped(2), 0)
    sender.send(Stamped(3), [1])
    assert sorted(sender.verify().workers) == [0, 1, 2]
    assert fleet.stamps() == [2, 3, 1]


def test_parts_of_the_weights(fleet):
    sender = fleet.open(checksum=True, partial=True)
    sender.send(Stamped(1))
    sender.send({"layer.bias": Stamped(2).state_dict()["layer.bias"]})
    assert sender.verify().leaves == LEAVES


def test_without_checksums_or_weights(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    with pytest.raises(ProtocolError, match="make it with checksum=True"):
        sender.verify()


def test_before_the_first_send(fleet):
    sender = fleet.open(checksum=True)
    with pytest.raises(ProtocolError, match=r"were sent to worker 0 yet; send\(\) first"):
        sender.verify()


@over_pipes
def test_who_does_not_answer_is_named(fleet):
    sender = fleet.open(checksum=True)
    sender.send(Stamped(1))
    fleet.hold(1)
    began = time.monotonic()
    with naming(AckTimeout, [1]):
        sender.verify(timeout=0.2)
    assert time.monotonic() - began >= 0.2
    fleet.release(1)
    assert sorted(sender.verify().workers) == [0, 1, 2]
    assert sender.send(Stamped(2)) == 2
    assert fleet.stamps() == [2, 2, 2]


@over_pipes
def test_who_is_dead_is_named(fleet):
    sender = fleet.open(checksum=True)
    sender.send(Stamped(1))
    fleet.workers[2].kill()
    with naming(WorkerDied, [2]):
        sender.verify()
    assert sorted(sender.verify().workers) == [0, 1]  # as a send leaves it out from now on


@over_pipes
def test_a_model_that_came_with_other_values_is_found_before_it_receives(fleet):
    sender = fleet.open(checksum=True)
    sender.send(Stamped(1))
    fleet.hold()
    with pytest.raises(AckTimeout):
        sender.send(stamp(Stamped(), 2), timeout=0.05)
    for worker in fleet.workers:
        worker.call(peers.hold, False)
    until(lambda: fleet.stamps() == [2, 2, 2])
    assert sender.verify().version == 2  # it was late, and is there
