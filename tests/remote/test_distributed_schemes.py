"""DistributedWeightSyncScheme over a real gloo process group: who gets what, and what deaths and stops do."""

from __future__ import annotations

import os

import pytest

import shmsync
from shmsync import DistributedWeightSyncScheme
from support import processes
from support.calls import naming
from support.processes import until
from support.remote import members, parts
from support.remote.members import FOR_EVER


@pytest.fixture
def ranks(fleet):
    """ranks(2) -> a Fleet that is connected."""
    return lambda count, keeper=None: fleet(count).connect("distributed", keeper=keeper)


def until_sent(worker):
    """A message has come to a worker, which has not read it; more than what gloo says of its bytes."""
    until(lambda: processes.unread(worker.pid) > 200)


def connect_alone(group, size, value, *, fetches=False):
    """Its one rank, which has this value as version 1. It gets weights by gloo, as on another node, or fetches them."""
    (worker,) = group.workers
    worker.call(members.make_member, size, loop=False)
    if not fetches:
        group.trainer.call(parts.set_environment, SHMSYNC_NODE="another")  # ranks on its own read them where they lie
    group.trainer.call(parts.make_sender, "distributed", 1, size, timeout=FOR_EVER)
    worker.start(members.receive, FOR_EVER)
    group.send(value)
    assert worker.result()
    return worker


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


def test_only_the_ranks_that_were_given(ranks):
    group = ranks(2)
    for worker in group.workers:
        worker.call(members.make_member, 500)
    group.trainer.call(parts.make_sender_with, 500, own_store=True, ranks=[2])
    assert group.send(3) == 1
    assert group.look() == [(0, 0), (3, 1)]


def test_without_a_process_group_a_sender_says_what_it_needs():
    scheme = DistributedWeightSyncScheme()
    with pytest.raises(shmsync.ProtocolError, match="init_process_group.*ranks= or num_workers="):
        scheme.init_on_sender("policy")
    with pytest.raises(shmsync.ProtocolError, match="init_process_group"):
        DistributedWeightSyncScheme().init_on_sender("policy", num_workers=1)


# conformance/trouble/test_death.py kills ranks that are here. The large weights do not fit the buffers of a connection.
KILLED = [("elsewhere", when, 500) for when in ("idle", "under way", "unanswered", "stopped")]
KILLED += [(where, "under way", 1_000_000) for where in ("here", "elsewhere")]


@pytest.mark.parametrize(("where", "when", "size"), KILLED, ids=lambda value: str(value))
def test_a_killed_rank_is_named_and_the_next_send_goes_on_without_it(fleet, start, server, where, when, size):
    """Elsewhere its pid means nothing, as on another machine: the end of a connection tells."""
    if where == "elsewhere" and os.geteuid() != 0:
        pytest.skip("needs root, to make a process namespace")
    group = fleet(1)
    victim = start() if where == "here" else parts.ElsewhereWorker(server)
    group.add(victim)
    group.connect("distributed")
    group.workers[0].call(members.make_member, size)
    victim.call(members.make_member, size, loop=False)
    group.trainer.call(parts.make_sender, "distributed", 2, size, timeout=FOR_EVER)
    victim.start(members.receive, FOR_EVER)
    group.send(9)  # which connects to it
    victim.result()
    if when == "stopped":  # it counts as alive
        victim.stop()
        with naming(shmsync.AckTimeout, [1]):
            group.send(2, timeout=5.0)
    if when == "under way":
        victim.stop()
        group.trainer.start(parts.send, 1)
        until_sent(victim)
        victim.kill()
    elif when == "unanswered":
        victim.start(members.take_unanswered)
        group.trainer.start(parts.send, 1)
        assert victim.result() == "policy"
        victim.kill()
    else:
        victim.kill()
        group.trainer.start(parts.send, 1)
    named = rf"worker 1 .*pid {victim.pid}" if where == "here" else "worker 1 "
    with naming(shmsync.WorkerDied, [1], match=named):
        group.trainer.result()
    assert group.look(0)[0][0] == 1  # the other one has it all the same
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
    group.trainer.call(parts.make_sender, "distributed", 2, 500, timeout=5.0)
    with naming((shmsync.AckTimeout, shmsync.WorkerDied), [0]):
        group.send(1)
    assert group.look(1) == [(1, 1)]


@pytest.mark.parametrize("fetches", [False, True])
def test_a_trainer_that_is_stopped_in_the_middle_keeps_nobody(ranks, start, fetches):
    keeper = start()
    group = ranks(1, keeper=keeper)
    worker = connect_alone(group, 4_000_000, 9, fetches=fetches)
    worker.stop()
    group.trainer.start(parts.send, 1)
    until_sent(worker)  # gloo has told it of the weights, and sends them when it asks
    group.trainer.stop()
    worker.resume()
    assert [worker.call(members.receive, 0.3) for _ in range(2)] == [False, False]
    group.trainer.resume()
    assert worker.call(members.receive, FOR_EVER)
    assert group.trainer.result() == 2
    assert group.look() == [(1, 2)]


@pytest.mark.parametrize("keeper", ["the trainer", "another"])
@pytest.mark.parametrize("when", ["idle", "waiting", "under way"])
def test_receive_outlives_the_trainer(fleet, start, when, keeper):
    """The store's process is the trainer, or one that lives on."""
    another = start()
    group = fleet(1).connect("distributed", keeper=another if keeper == "another" else None)
    worker = connect_alone(group, 2_000_000, 1)
    if when == "under way":
        worker.stop()
        group.trainer.start(parts.send, 2)
        until_sent(worker)
    elif when == "waiting":
        worker.begin(members.receive, FOR_EVER if keeper == "the trainer" else 2.0)
    group.trainer.kill()
    worker.resume()
    raises = keeper == "the trainer" or when == "under way"
    seconds = FOR_EVER if raises else 0.3
    result = worker.result if when == "waiting" else lambda: worker.call(members.receive, seconds)
    if raises:
        with pytest.raises(shmsync.WriterDied):
            result()
    else:
        assert not result()
    if keeper == "another":  # what was under way does not come any more
        assert not worker.call(members.receive, 0.3)
    assert group.look() == [(1, 1)]
