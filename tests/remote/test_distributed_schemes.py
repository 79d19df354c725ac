"""DistributedWeightSyncScheme over a real gloo process group: who gets what, and what deaths and stops do."""

from __future__ import annotations

import os

import pytest

import shmsync
from shmsync import DistributedWeightSyncScheme
from support.calls import naming
from support.remote import members, parts
from support.remote.members import FOR_EVER


@pytest.fixture
def ranks(fleet):
    """ranks(2) -> a Fleet that is connected."""
    return lambda count: fleet(count).connect("distributed")


def test_every_backend_but_gloo_is_refused():
    with pytest.raises(ValueError, match="'nccl'"):
        DistributedWeightSyncScheme("nccl")


def test_the_default_process_group_tells_the_store_and_the_ranks(ranks):
    group = ranks(2)
    for worker in group.workers:
        worker.call(members.make_member_of_the_group, 500)
    group.trainer.call(parts.make_sender_with, 500)
    assert group.send(3) == 1
    assert group.look() == [(3, 1), (3, 1)]


def test_without_a_process_group_a_sender_says_what_it_needs():
    scheme = DistributedWeightSyncScheme()
    with pytest.raises(shmsync.ProtocolError, match="init_process_group.*ranks= or num_workers="):
        scheme.init_on_sender("policy")
    with pytest.raises(shmsync.ProtocolError, match="init_process_group"):
        DistributedWeightSyncScheme().init_on_sender("policy", num_workers=1)


def test_only_the_ranks_that_were_given(ranks):
    group = ranks(2)
    for worker in group.workers:
        worker.call(members.make_member, 500)
    group.trainer.call(parts.make_sender_with, 500, own_store=True, ranks=[2])
    assert group.send(3) == 1
    assert group.look() == [(0, 0), (3, 1)]


@pytest.mark.parametrize(("where", "answers"), [("here", True), ("elsewhere", False)])
def test_a_killed_rank_is_named_and_the_next_send_goes_on_without_it(fleet, start, server, where, answers):
    """Elsewhere its pid means nothing, as on another machine: the end of a connection tells."""
    if where == "elsewhere" and os.geteuid() != 0:
        pytest.skip("needs root, to make a process namespace")
    group = fleet(1)
    victim = start() if where == "here" else parts.ElsewhereWorker(server)
    group.add(victim)
    group.connect("distributed")
    group.workers[0].call(members.make_member, 500)
    victim.call(members.make_member, 500, loop=False)
    group.trainer.call(parts.make_sender, "distributed", 2, 500, timeout=FOR_EVER)
    victim.start(members.receive, FOR_EVER)
    group.send(9)  # which connects to it
    victim.result()
    if answers:
        victim.kill()
        group.trainer.start(parts.send, 1)
    else:  # it has the weights, and dies before it answers
        victim.start(members.take_unanswered)
        group.trainer.start(parts.send, 1)
        assert victim.result() == "policy"
        victim.kill()
    with naming(shmsync.WorkerDied, [1], match="worker 1 "):
        group.trainer.result()
    assert group.look(0) == [(1, 2)]  # the other one has it all the same
    assert group.trainer.call(parts.dead) == [1]
    group.send(2)
    assert group.look(0)[0][0] == 2
    with pytest.raises(shmsync.WorkerDied, match="nothing was sent"):
        group.send(3, workers=1)


def test_a_rank_that_dies_before_it_was_ever_a_worker_is_late(ranks):
    # It never said where it is, so only the deadline tells.
    group = ranks(2)
    group.workers[1].call(members.make_member, 500)
    group.workers[0].kill()
    group.trainer.call(parts.make_sender, "distributed", 2, 500, timeout=2.0)
    with naming((shmsync.AckTimeout, shmsync.WorkerDied), [0]):
        group.send(1)
    assert group.look(1) == [(1, 1)]


def test_receive_outlives_the_trainer(ranks):
    group = ranks(1)
    (worker,) = group.workers
    worker.call(members.make_member, 500, loop=False)
    group.trainer.call(parts.make_sender, "distributed", 1, 500, timeout=FOR_EVER)
    worker.start(members.receive, FOR_EVER)
    group.send(1)
    assert worker.result()
    worker.begin(members.receive, FOR_EVER)
    group.trainer.kill()
    with pytest.raises(shmsync.WriterDied):
        worker.result()
    assert group.look() == [(1, 1)]
