"""The promises of a send over RPC and torch.distributed, with fan-out and without. Ray's are in ray/."""

from __future__ import annotations

import pytest

import shmsync
from support.calls import naming
from support.remote import parts


@pytest.fixture(params=[None, "node"])
def fan_out(request):
    return request.param


def test_a_send_returns_when_all_have_applied_it_or_raises_an_error_that_names_who_has_not(fleet, kind, fan_out):
    group = fleet(3, nodes=["a", "b", "b"], home="a").connect(kind).open(fan_out=fan_out)
    assert [group.send(5), group.send(6)] == [1, 2]
    assert group.look() == [(6, 2)] * 3
    assert group.trainer.call(parts.send_async, 7) == 3
    with pytest.raises(RuntimeError, match=r"wait_async\(\) first"):
        group.send(8)
    assert group.trainer.call(parts.wait_async) == 3
    with pytest.raises(shmsync.ManifestMismatch, match="weight"):
        group.trainer.call(parts.send_what_does_not_fit)
    assert [value for value, _ in group.look()] == [7] * 3
    group.workers[2].stop()
    with naming(shmsync.AckTimeout, [2]):
        group.send(9, timeout=2.0)
    group.workers[2].resume()
    version = group.send(10)
    assert group.look() == [(10, version)] * 3


def test_worker_ids_choose_who_gets_it(fleet, kind):
    group = fleet(3).connect(kind).open()
    for version, (workers, values) in enumerate([(1, [0, 1, 0]), ([0, 2], [2, 1, 2]), (None, [3] * 3)], 1):
        assert group.send(version, workers=workers) == version
        assert [value for value, _ in group.look()] == values


def test_a_killed_worker_is_named_and_another_takes_its_place(fleet, kind, fan_out):
    group = fleet(4, nodes=["a", "b", "b", "b"], home="a").connect(kind).open(workers=3, fan_out=fan_out)
    group.send(1)
    group.workers[1].kill()
    with pytest.raises(shmsync.WorkerDied, match="worker 1 ") as died:
        group.send(2)
    assert {1} <= set(died.value.missing) <= {1, "the relay on node b"}
    assert group.look(0, 2) == [(2, 2)] * 2
    assert group.send(3) == 3
    assert group.look(0, 2) == [(3, 3)] * 2
    assert group.trainer.call(parts.dead) == [1]
    group.trainer.call(parts.replace, 1, 4, 500)
    assert group.send(4) == 4
    assert group.look(0, 2, 3) == [(4, 4)] * 3
