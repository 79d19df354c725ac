"""The promises of a send, over the schemes for several machines."""

import pytest
import torch

from shmsync.errors import AckTimeout, ManifestMismatch, WorkerDied
from support.calls import naming
from support.conformance import peers
from support.conformance.nets import Stamped
from support.conformance.table import DISTRIBUTED, RAY, RAY_MODULE, RPC, only

fanned_out = only(RAY[1], RPC[2], DISTRIBUTED[2])
LONG = 60.0  # seconds; a send that notices a death returns long before


@only(*RAY, RPC[0], RPC[2], DISTRIBUTED[0], DISTRIBUTED[2])
def test_a_send_returns_when_all_have_applied_it_or_raises_an_error_that_names_who_has_not(fleet):
    sender = fleet.open()
    assert [sender.send(Stamped(5)), sender.send(Stamped(6).state_dict())] == [1, 2]
    assert (fleet.stamps(), fleet.versions()) == ([6] * 3, [2] * 3)
    assert sender.send_async(Stamped(7)) == 3
    with pytest.raises(RuntimeError, match=r"wait_async\(\) first"):
        sender.send(Stamped(8))
    assert sender.wait_async() == 3
    with pytest.raises(ManifestMismatch, match=r"layer\.bias"):
        sender.send({**Stamped(8).state_dict(), "layer.bias": torch.zeros(3)})
    assert fleet.stamps() == [7] * 3
    fleet.hold(2)
    with naming(AckTimeout, [2]):
        sender.send(Stamped(9), timeout=2 if fleet.relayed else 0.5)
    fleet.release(2)
    version = sender.send(Stamped(10))
    assert (fleet.stamps(), fleet.versions()) == ([10] * 3, [version] * 3)


@only(RAY[0], RAY_MODULE, RPC[0], RPC[2], DISTRIBUTED[0], DISTRIBUTED[2])
def test_a_killed_worker_is_named_and_another_takes_its_place(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    fleet.workers[1].kill()
    with pytest.raises(WorkerDied, match="worker 1 ") as died:
        sender.send(Stamped(2), timeout=LONG)
    assert died.value.missing[0] == 1 and set(died.value.missing[1:]) <= {"the relay on node b"}
    assert fleet.stamps(workers=[0, 2]) == [2, 2]
    assert sender.send(Stamped(3), timeout=LONG) == 3
    assert fleet.stamps(workers=[0, 2]) == [3, 3] and sender.is_dead(1)
    fleet.replace(1)
    fleet.register(sender, 1)
    fleet.join(1, fleet.schemes[0])
    assert sender.send(Stamped(4), timeout=LONG) == 4
    assert fleet.stamps() == [4] * 3


@only(RAY[0], RPC[0], DISTRIBUTED[0])
def test_worker_ids_choose_who_gets_it(fleet):
    sender = fleet.open()
    for version, (worker_ids, stamps) in enumerate([(1, [0, 1, 0]), ([0, 2], [2, 1, 2]), (None, [3] * 3)], 1):
        assert sender.send(Stamped(version), worker_ids) == version
        assert fleet.stamps() == stamps


@fanned_out
def test_workers_of_a_node_are_bound_to_one_memory_and_a_send_is_for_all_of_them(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    assert fleet.stamps() == [1, 1, 1]
    permissions, inodes, _ = zip(*(worker.call(peers.mapping_of_weights) for worker in fleet.workers), strict=True)
    assert not any("w" in each for each in permissions)
    assert len(set(inodes)) == (2 if fleet.relayed else 1)
    with pytest.raises(ValueError, match="share one arena on node"):
        sender.send(Stamped(2), 1)
    assert fleet.stamps() == [1, 1, 1]
