"""fan_out="node" for RPC and for torch.distributed: relays, what they share, and what their deaths do.

Nodes are values of SHMSYNC_NODE here, and process namespaces; test_network_nodes.py has networks between them.
"""

from __future__ import annotations

import itertools
import os

import pytest

import shmsync
from support.calls import naming
from support.processes import segments, unread, until
from support.remote import fetching, members, parts


@pytest.fixture
def on_nodes(fleet, kind):
    """on_nodes(["a", "a", "b"]) -> a Fleet whose workers are on these nodes, and its trainer on another one."""

    def make(nodes, home="home", **options):
        return fleet(len(nodes), nodes=nodes, home=home).connect(kind).open(fan_out="node", **options)

    return make


def mappings(group, *who):
    return [group.workers[index].call(members.mapping) for index in who]


@pytest.mark.parametrize("slots", [1, 3])
def test_the_workers_of_a_node_share_one_slab_that_they_cannot_write(on_nodes, slots):
    group = on_nodes(["a", "b", "a", "b"], slots=slots)
    for version in (1, 2, 3):
        assert group.send(10 * version) == version
        assert group.look() == [(10 * version, version)] * 4
    found = mappings(group, 0, 1, 2, 3)
    assert all("memfd:shmsync" in path for _, _, path in found)
    assert {permissions for permissions, _, _ in found} == {"r--s"}
    inodes = [inode for _, inode, _ in found]
    assert inodes[0] == inodes[2] and inodes[1] == inodes[3]
    assert inodes[0] != inodes[1]


def test_one_copy_goes_to_each_node(on_nodes, kind):
    group = on_nodes(["a", "b", "a", "b"])
    group.send(1)
    if kind == "rpc":
        # What the method of the class gets tells only where they lie.
        assert [worker.call(members.attribute, "came") for worker in group.workers] == [["Announcement"]] * 4
    else:
        group.trainer.call(parts.count_isends)
        group.send(2)
        sent = group.trainer.call(parts.isends)
        assert [rank for rank, _ in sent] == [1, 2]
        assert all(nbytes >= 4 * 501 * 4 for _, nbytes in sent)


def test_a_trainer_that_shares_a_node_sends_one_copy_to_the_other(on_nodes, kind):
    group = on_nodes(["a", "b", "b"], home="a")
    if kind == "distributed":
        group.trainer.call(parts.count_isends)
    group.send(4)
    assert group.look() == [(4, 1)] * 3
    if kind == "rpc":
        assert group.workers[0].call(members.attribute, "came") == ["Announcement"]  # no relay on the trainer's node
    else:
        assert {rank for rank, _ in group.trainer.call(parts.isends)} == {2}
    inodes = [inode for _, inode, _ in mappings(group, 0, 1, 2)]
    assert members.can_write(group.trainer.pid, inodes[0])
    assert inodes[1] == inodes[2] != inodes[0]
    assert not members.can_write(group.workers[0].pid, inodes[0])
    assert members.can_write(group.workers[1].pid, inodes[1])  # the relay


@pytest.mark.parametrize("when", ["first", "idle", "under way"])
def test_a_killed_relay_is_named_and_replaced_in_the_same_send(on_nodes, when):
    group = on_nodes(["a", "b", "a", "b"], size=500 if when != "under way" else 500_000)
    version = itertools.count(1)
    if when != "first":
        group.send(next(version))
        old = mappings(group, 2, 3)
    if when == "under way":
        group.workers[0].stop()
        group.trainer.start(parts.send, 7)
        until(lambda: unread(group.workers[0].pid))  # the weights, or word of them
        group.workers[0].kill()
    elif when == "idle":
        group.workers[0].kill()
        group.trainer.start(parts.send, 7)
    else:
        group.workers[0].call(members.die_as_relay)
        group.trainer.start(parts.send, 7)
    number = next(version)
    with naming(shmsync.WorkerDied, {"the relay on node a", 0}, match="worker 0 .*the relay on node a "):
        group.trainer.result()
    assert group.look(1, 2, 3) == [(7, number)] * 3
    assert group.trainer.call(parts.dead) == [0]
    number = next(version)
    assert group.send(8) == number
    assert group.look(1, 2, 3) == [(8, number)] * 3
    if when != "first":
        new = mappings(group, 2, 3)
        assert new[0] != old[0]  # worker 2 is the relay now
        assert new[1] == old[1]
    (_, inode, _) = mappings(group, 2)[0]
    assert members.can_write(group.workers[2].pid, inode)


def test_when_the_next_relay_dies_too_both_are_named_and_the_send_after_it_goes_on(on_nodes):
    group = on_nodes(["a", "b", "a", "a"])
    for index in (0, 2):
        group.workers[index].call(members.die_as_relay)
    missing = {"the relay on node a", 0, 2, 3}  # worker 3 is alive, but was not reached
    with naming(shmsync.WorkerDied, missing, match="the relay on node a"):
        group.send(1)
    assert group.look(1, 3) == [(1, 1), (0, 0)]
    assert group.trainer.call(parts.dead) == [0, 2]
    assert group.send(2) == 2
    assert group.look(1, 3) == [(2, 2)] * 2


def test_a_node_whose_workers_are_all_dead_keeps_nobody_else(on_nodes):
    group = on_nodes(["a", "b", "a"])
    group.send(1)
    for index in (0, 2):
        group.workers[index].kill()
    with pytest.raises(shmsync.WorkerDied, match="the relay on node a") as caught:
        group.send(2)
    assert {0, 2} <= set(caught.value.missing)
    assert group.look(1) == [(2, 2)]
    assert group.send(3) == 3
    assert group.look(1) == [(3, 3)]


@pytest.mark.parametrize("nodes", [["a", "b", "a"], ["a", "a", "b"]], ids=["beside its relay", "alone on its node"])
def test_a_killed_worker_that_is_no_relay_is_named_alone(on_nodes, nodes):
    group = on_nodes(nodes)
    group.send(1)
    group.workers[2].kill()
    with naming(shmsync.WorkerDied, [2], match="worker 2 "):
        group.send(2)
    assert group.look(0, 1) == [(2, 2)] * 2
    group.send(3)
    assert group.look(0, 1) == [(3, 3)] * 2


def test_a_stopped_relay_makes_its_node_late_and_no_other(on_nodes):
    group = on_nodes(["a", "b", "a"])
    group.send(1)
    group.workers[0].stop()
    with naming(shmsync.AckTimeout, {"the relay on node a", 0, 2}, match="the relay on node a"):
        group.send(2, timeout=5.0)
    assert group.look(1) == [(2, 2)]
    group.workers[0].resume()
    assert group.send(3) == 3
    assert group.look() == [(3, 3)] * 3


@pytest.mark.parametrize("scheme", ["a new one", "the same"])
def test_a_second_init_on_sender_counts_from_one_in_new_arenas_and_ends_the_first_ones(on_nodes, kind, scheme):
    group = on_nodes(["a", "b", "b"], home="b")
    group.send(1)
    assert group.send(2) == 2
    old, arenas = mappings(group, 0, 1), [path for each in group.everybody for path in segments(each.pid)]
    assert len(arenas) == 2
    if scheme == "the same":
        group.trainer.call(parts.init_again, kind)
    else:  # as of a trainer that was started again
        group.trainer.call(parts.make_sender_anew, kind, fan_out="node")
    assert group.send(7) == 1
    assert group.look() == [(7, 1)] * 3
    new = mappings(group, 0, 1)
    assert new[0] != old[0] and new[1] != old[1]
    until(lambda: not any(path.exists() for path in arenas))


def test_a_worker_that_joins_a_node_attaches_to_its_arena(fleet):
    group = fleet(3, nodes=["a", "a", "b"], home="home").connect("rpc").open(workers=1, fan_out="node")
    group.send(1)
    old = mappings(group, 0)
    for rank in (2, 3):
        group.trainer.call(parts.add_collector, rank, 500)
    for version in (2, 3):
        assert group.send(version) == version
        assert group.look() == [(version, version)] * 3
    assert mappings(group, 0, 1) == old * 2
    group.trainer.call(parts.remove_collector, 0)  # with the relay
    for version in (4, 5):
        assert group.send(version) == version
        assert group.look(1, 2) == [(version, version)] * 2
    assert mappings(group, 1) != old
    until(lambda: group.workers[0].call(fetching.relays_here) == 0)


def test_the_first_of_two_receivers_in_the_relays_process_may_leave(fleet):
    group = fleet(2, nodes=["a", "b"], home="home").connect("rpc").open(workers=1, fan_out="node")
    group.trainer.call(parts.add_collector, 1, 500, "second")
    group.send(1)
    group.trainer.call(parts.remove_collector, 0)  # the relay was of its
    for value in (2, 3):
        assert group.send(value) == value
        assert group.workers[0].call(members.look, "second") == (value, value)


def test_a_node_that_all_workers_have_left_keeps_no_arena(fleet):
    group = fleet(2, nodes=["a", "b"], home="home").connect("rpc").open(fan_out="node")
    group.send(1)
    assert len(segments(group.workers[1].pid)) == 1
    group.trainer.call(parts.remove_collector, 1)
    assert group.send(2) == 2
    until(lambda: not segments(group.workers[1].pid))
    assert group.look() == [(2, 2), (1, 1)]  # it keeps what it has


def test_a_process_namespace_is_a_node_of_its_own(fleet, server, kind):
    if os.geteuid() != 0:
        pytest.skip("needs root, to make process namespaces")
    group = fleet(0)
    for _ in range(2):
        group.add(parts.ElsewhereWorker(server))
    group.connect(kind).open(fan_out="node")
    assert group.send(1) == 1
    assert group.look() == [(1, 1)] * 2
    inodes = [worker.call(members.mapping)[1] for worker in group.workers]
    assert inodes[0] != inodes[1]
    group.workers[0].kill()
    with pytest.raises(shmsync.WorkerDied, match="worker 0 ") as caught:
        group.send(2)
    assert 0 in caught.value.missing and 1 not in caught.value.missing
    assert group.look(1) == [(2, 2)]
    assert group.send(3) == 3
    assert group.look(1) == [(3, 3)]
