"""Large weights for RPC workers and ranks: fetched from the trainer's memory, or over a connection of ours."""

from __future__ import annotations

import pytest

import shmsync
from support.calls import naming
from support.choice import first
from support.descriptors import exhaust
from support.processes import segments, until
from support.remote import fetching, members, parts
from support.remote.fetching import MANY


@pytest.mark.parametrize("nodes", [["a", "a"], ["a", "b"]], ids=["beside the trainer", "one elsewhere"])
def test_every_worker_gets_large_weights_and_the_trainer_keeps_none(fleet, kind, nodes):
    group = fleet(2, nodes=nodes, home="a").connect(kind).open(MANY)
    for version in (1, 2, 3, 4):
        assert group.send(10 * version) == version
        assert group.look() == [(10 * version, version)] * 2
    until(lambda: group.trainer.call(fetching.kept_packed) == 0)


@pytest.mark.parametrize("node", ["a", "b"], ids=["beside the trainer", "elsewhere"])
def test_a_worker_that_cannot_fetch_them_gets_them_by_rpc_itself(fleet, node):
    group = fleet(2, nodes=["a", node], home="a").connect("rpc").open(MANY)
    group.trainer.call(fetching.log)
    group.workers[1].call(exhaust)
    for version in (1, 2, 3):
        assert group.send(10 * version) == version
        assert group.look() == [(10 * version, version)] * 2
    (line,) = group.trainer.call(fetching.logged)  # once
    assert "worker 1 cannot fetch weights from here" in line


def test_a_rank_that_cannot_fetch_them_gets_them_by_the_process_group(fleet):
    group = fleet(2, nodes=["a", "a"], home="a").connect("distributed").open(MANY)
    group.send(1)
    group.trainer.call(fetching.log)
    group.trainer.call(fetching.block_the_port)
    for version in (2, 3):
        assert group.send(10 * version) == version
        assert group.look() == [(10 * version, version)] * 2
    lines = group.trainer.call(fetching.logged)
    assert sorted(line.partition(" cannot")[0] for line in lines) == ["worker 0", "worker 1"]  # once each


@pytest.mark.parametrize("node", ["a", "b"], ids=["beside the trainer", "elsewhere"])
def test_a_worker_that_is_killed_with_weights_under_way_is_named_and_frees_them(fleet, node):
    group = fleet(2, nodes=["a", node], home="a").connect("rpc").open(MANY)
    group.send(1)
    group.workers[1].call(members.hold)
    group.trainer.start(parts.send, 2)
    group.workers[1].call(members.wait_held)
    group.workers[1].kill()
    with naming(shmsync.WorkerDied, [1]):
        group.trainer.result()
    assert group.look(0) == [(2, 2)]
    assert group.send(3) == 3
    assert group.look(0) == [(3, 3)]
    until(lambda: group.trainer.call(fetching.kept_packed) == 0)


@pytest.mark.full  # a quarter of a minute
@pytest.mark.parametrize("node", first(["a", "b"]), ids=["beside the trainer", "elsewhere"])
def test_a_late_worker_gets_whole_weights_however_often_the_others_have_been_sent_to(fleet, node):
    group = fleet(2, nodes=["a", node], home="a").connect("rpc").open(MANY)
    group.send(1)
    group.workers[1].stop()
    for value in (2, 3, 4, 5):
        with naming(shmsync.AckTimeout, [1]):
            group.send(value, timeout=3.0)
        assert group.look(0) == [(value, value)]
    group.workers[1].resume()
    assert group.send(6) == 6
    assert group.look() == [(6, 6)] * 2
    applied = group.workers[1].call(members.attribute, "applied")
    assert applied == [1, 2, 6]


# ---- fan_out="node", and a node with one worker


@pytest.mark.parametrize("size", [500, MANY])
def test_the_only_worker_of_a_node_is_asked_once(fleet, kind, size):
    group = fleet(2, nodes=["a", "b"], home="a").connect(kind).open(size, fan_out="node")
    for version in (1, 2, 3):
        assert group.send(10 * version) == version
        assert group.look() == [(10 * version, version)] * 2
    if kind == "rpc":
        assert group.workers[1].call(members.attribute, "came") == ["Unpublished"] * 3
    assert group.workers[1].call(fetching.relays_here) == 1
    permissions, inode, _ = group.workers[1].call(members.mapping)
    assert permissions == "r--s" and members.can_write(group.workers[1].pid, inode)
    group.trainer.call(parts.shut_down)
    until(lambda: group.workers[1].call(fetching.relays_here) == 0)
    until(lambda: not segments(group.workers[1].pid))
    assert segments(group.trainer.pid) == []


def test_what_the_only_worker_cannot_publish_raises_in_the_trainer(fleet, kind):
    group = fleet(1, nodes=["b"], home="a").connect(kind).open(fan_out="node")
    group.send(1)
    with pytest.raises(shmsync.ManifestMismatch):
        group.trainer.call(parts.send_other_model, 7)
    version = group.send(3)
    assert group.look() == [(3, version)]
