"""What holds for schemes for several machines alone."""

import pytest

from shmsync.errors import AckTimeout
from support.conformance import peers
from support.conformance.nets import Stamped
from support.conformance.table import SCHEMES, only, remotely

fanned_out = only(*(entry for entry in SCHEMES if entry.name.endswith(("fan-out", "relay"))))


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
    for version, inode in enumerate(sorted(set(inodes)), 2):
        node = [index for index in range(3) if inodes[index] == inode]
        assert sender.send(Stamped(version), node) == version
        assert fleet.stamps(workers=node) == [version] * len(node)


@remotely
def test_stopped_worker_is_late_and_the_next_send_finds_it_again(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    worker = fleet.workers[2]  # no relay
    worker.stop()
    for version in (2, 3):  # the second time, the first message is still under way
        with pytest.raises(AckTimeout, match="worker 2") as late:
            sender.send(Stamped(version), timeout=2 if fleet.relayed else 1)
        assert (late.value.missing, late.value.version) == ([2], version)
        assert fleet.stamps(workers=[0, 1]) == [version, version]
    worker.resume()
    assert sender.send(Stamped(4), timeout=60) == 4
    assert fleet.stamps() == [4, 4, 4]
    assert fleet.versions() == [4, 4, 4]
