"""fan_out="node" for RPC and for torch.distributed: relays, what they share, and what their deaths do.

Nodes are values of SHMSYNC_NODE here, and process namespaces.
"""

from __future__ import annotations

import os

import pytest

import shmsync
from support.calls import naming
from support.processes import segments, until
from support.remote import members, parts


@pytest.fixture
def on_nodes(fleet, kind):
    """on_nodes(["a", "a", "b"]) -> a Fleet whose workers are on these nodes, and its trainer on another one."""

    def make(nodes, home="home", **options):
        return fleet(len(nodes), nodes=nodes, home=home).connect(kind).open(fan_out="node", **options)

    return make


def mappings(group, *who):
    return [group.workers[index].call(members.mapping) for index in who]


@pytest.mark.parametrize("kind", ["rpc"])
def test_the_workers_of_a_node_share_one_slab_that_they_cannot_write(on_nodes):
    """No relay is needed on the trainer's own node."""
    group = on_nodes(["a", "b", "b"], home="a")
    for version in (1, 2, 3):
        assert group.send(10 * version) == version
        assert group.look() == [(10 * version, version)] * 3
    with pytest.raises(ValueError, match="share one arena on node"):
        group.send(40, workers=1)
    found = mappings(group, 0, 1, 2)
    assert all("memfd:shmsync" in path for _, _, path in found)
    assert {permissions for permissions, _, _ in found} == {"r--s"}
    inodes = [inode for _, inode, _ in found]
    assert inodes[1] == inodes[2] != inodes[0]
    assert members.can_write(group.trainer.pid, inodes[0])
    assert not members.can_write(group.workers[0].pid, inodes[0])
    group.trainer.call(parts.shut_down)
    until(lambda: not any(segments(each.pid) for each in group.everybody))


@pytest.mark.parametrize(("kind", "when"), [("distributed", "first"), ("rpc", "idle")])
def test_a_killed_relay_is_named_and_replaced_in_the_same_send(on_nodes, when):
    group = on_nodes(["a", "b", "a"])
    if when == "first":
        group.workers[0].call(members.die_as_relay)
    else:
        group.send(1)
        group.workers[0].kill()
    group.trainer.start(parts.send, 7)
    number = 1 if when == "first" else 2
    with naming(shmsync.WorkerDied, {"the relay on node a", 0}, match="worker 0 .*the relay on node a "):
        group.trainer.result()
    assert group.look(1, 2) == [(7, number)] * 2
    assert group.trainer.call(parts.dead) == [0]
    assert group.send(8) == number + 1
    assert group.look(1, 2) == [(8, number + 1)] * 2


@pytest.mark.parametrize("kind", ["distributed"])
def test_a_stopped_relay_makes_its_node_late_and_no_other(on_nodes):
    group = on_nodes(["a", "b", "a"])
    group.send(1)
    group.workers[0].stop()
    with naming(shmsync.AckTimeout, {"the relay on node a", 0, 2}, match="the relay on node a"):
        group.send(2, timeout=2.0)
    assert group.look(1) == [(2, 2)]
    group.workers[0].resume()
    assert group.send(3) == 3
    assert group.look() == [(3, 3)] * 3


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


def test_a_node_that_all_workers_have_left_keeps_no_arena(fleet):
    group = fleet(2, nodes=["a", "b"], home="home").connect("rpc").open(fan_out="node")
    group.send(1)
    assert len(segments(group.workers[1].pid)) == 1
    group.trainer.call(parts.remove_collector, 1)
    assert group.send(2) == 2
    until(lambda: not segments(group.workers[1].pid))
    assert group.look() == [(2, 2), (1, 1)]  # it keeps what it has


def test_a_process_namespace_is_a_node_of_its_own(fleet, server):
    if os.geteuid() != 0:
        pytest.skip("needs root, to make process namespaces")
    group = fleet(0)
    for _ in range(2):
        group.add(parts.ElsewhereWorker(server))
    group.connect("rpc").open(fan_out="node")
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
