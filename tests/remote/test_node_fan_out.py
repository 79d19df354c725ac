"""fan_out="node" over torch.distributed: nodes are values of SHMSYNC_NODE here. Ray's is in ray/."""

from __future__ import annotations

import pytest

import shmsync
from support.calls import naming
from support.remote import fleet as parts


def test_the_workers_of_a_node_share_one_arena_that_they_cannot_write(fleet):
    group = fleet("distributed", 4, nodes=["a", "a", "b", "b", "c"]).open(fan_out="node", meta=[2])
    for version in (1, 2, 3):
        assert group.send(10 * version) == version
        assert group.look() == [(10 * version, version)] * 4
    found = [worker.call(parts.memory) for worker in group.workers]
    assert {permissions for permissions, _ in found} == {"r--s"}
    inodes = [inode for _, inode in found]
    assert inodes[1] == inodes[2] and len(set(inodes)) == 3
    with pytest.raises(ValueError, match="share one arena"):
        group.send(40, workers=1)
    for refused in (parts.send_what_does_not_fit, parts.send_a_part):
        with pytest.raises(shmsync.ManifestMismatch, match="bias"):
            group.trainer.call(refused)
        assert group.look() == [(30, 3)] * 4


def test_a_send_async_brings_the_weights_of_its_call_before_the_nodes_are_known_too(fleet):
    group = fleet("distributed", 2, nodes=["home", "home", "a"]).open(fan_out="node")
    for value in (5, 6):
        version = group.trainer.call(parts.send_async, value)
        group.trainer.call(parts.change, 9)
        assert group.trainer.call(parts.wait_async) == version
        assert group.look() == [(value, version)] * 2


def test_weights_that_fit_no_worker_change_none_whoever_leads(fleet):
    group = fleet("distributed", 3, nodes=["home", "a", "a", "a"]).open(fan_out="node")
    assert group.send(1) == 1
    for survivors in ([0, 1, 2], [1, 2]):
        with pytest.raises(shmsync.ManifestMismatch, match="bias"):
            group.trainer.call(parts.send_what_does_not_fit)
        assert group.look(*survivors) == [(1, 1)] * len(survivors)
        if 0 in survivors:
            group.workers[0].kill()
    version = group.send(2)
    assert group.look(1, 2) == [(2, version)] * 2


def test_a_part_of_the_weights_is_refused():
    with pytest.raises(ValueError, match="leave partial= out, or use fan_out=None"):
        shmsync.DistributedWeightSyncScheme(fan_out="node", partial=True)


def test_first_weights_that_fit_no_worker_do_not_decide_what_comes_later(fleet):
    group = fleet("distributed", 2, nodes=["home", "home", "a"]).open(fan_out="node")
    with pytest.raises(shmsync.ManifestMismatch, match="bias"):
        group.trainer.call(parts.send_what_does_not_fit)
    assert group.send(5) == 2
    assert group.look() == [(5, 2)] * 2


def test_a_sender_that_begins_its_versions_again_gets_new_arenas(fleet):
    options = {"fan_out": "node", "timeout": parts.FOR_EVER}
    group = fleet("distributed", 2, nodes=["home", "a", "a"]).open(fan_out="node")
    assert [group.send(1), group.send(2)] == [1, 2]
    group.trainer.call(parts.make_sender, "distributed", 2, options)
    for version in (1, 2, 3):
        assert group.send(10 * version) == version
        assert group.look() == [(10 * version, version)] * 2


@pytest.mark.parametrize("nodes", [["home", "home", "home"], ["home", "a", "a"]])
def test_a_resend_brings_the_last_weights_to_whole_nodes(fleet, nodes):
    group = fleet("distributed", 2, nodes=nodes).open(workers=1, fan_out="node")
    group.send(5)
    group.trainer.call(parts.replace, 1, 2)
    assert group.trainer.call(parts.resend) == 2
    assert group.look() == [(5, 2)] * 2
    assert group.send(6) == 3
    assert group.look() == [(6, 3)] * 2


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_another_worker_leads_its_node_when_the_leader_is_dead_or_late(fleet, end):
    group = fleet("distributed", 3, nodes=["home", "a", "a", "a"]).open(fan_out="node")
    group.send(1)
    first = group.leader()
    leader, others = group.workers[first], [index for index in range(3) if index != first]
    if end == "kill":
        leader.kill()
        with naming(shmsync.WorkerDied, [first], match=f"worker {first} "):
            group.send(2)
    else:
        leader.stop()
        with naming(shmsync.AckTimeout, [0, 1, 2]):
            group.send(2, timeout=1.0)
        with naming(shmsync.AckTimeout, [first]):
            group.send(3, timeout=2.0)
        assert group.look(*others) == [(3, 3)] * 2
        leader.resume()
    for _ in range(2):
        version = group.send(4)
        assert group.look(*others) == [(4, version)] * 2
    if end == "stop":
        assert group.look(first) == [(4, version)]
        assert len({worker.call(parts.memory)[1] for worker in group.workers}) == 1
