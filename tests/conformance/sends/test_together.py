"""send_together: no worker ever uses one model new and another old."""

import pytest

from shmsync.errors import AckTimeout, ManifestMismatch, WorkerDied
from shmsync.schemes import NoWeightSyncScheme, send_together
from support.calls import naming
from support.conformance import peers
from support.conformance.nets import Stamped, stamp
from support.conformance.table import MP, PIPES, SHM, in_processes, only


@pytest.fixture(params=PIPES, ids=lambda entry: entry.name)
def entry(request):
    """Models are sent together over pipes alone."""
    return request.param


def never_mixed(fleet, policy, value, times):
    """Send both models so many times to workers that use them in a loop, and look at what they used together."""
    nets = Stamped(), Stamped()
    users = fleet.workers[:2]
    for worker in users:
        worker.start(peers.record_pairs, "policy", "env.value_net")
    for number in range(1, times + 1):
        send_together({policy: stamp(nets[0], number), value: stamp(nets[1], number)}, timeout=60)
    for worker in users:
        pairs = worker.interrupt(peers.look)
        assert {pair for pair in pairs if pair[0] != pair[1]} == set()
        assert len(pairs) > times // 10  # so many of them were used
    assert fleet.stamps("policy") == fleet.stamps("env.value_net") == [times] * 3


@in_processes
def test_no_worker_ever_uses_a_new_policy_with_an_old_value_net(fleet):
    never_mixed(fleet, fleet.open("policy"), fleet.open("env.value_net"), 200)


@only(MP)
@pytest.mark.parametrize("schemes", [(MP, SHM), (SHM, MP)], ids=["policy-mp", "policy-shm"])
@in_processes
def test_no_worker_ever_mixes_versions_of_models_of_two_schemes(fleet, schemes):
    policy, value = (entry.make() for entry in schemes)
    never_mixed(fleet, fleet.open("policy", scheme=policy), fleet.open("env.value_net", scheme=value), 500)


def test_models_may_be_given_by_scheme_or_by_id(fleet):
    schemes = fleet.make(), fleet.make()
    policy = fleet.open("policy", scheme=schemes[0])
    fleet.open("env.value_net", scheme=schemes[1])
    send_together({schemes[0]: Stamped(1), schemes[1]: Stamped(2)})
    assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([1] * 3, [2] * 3)
    send_together({"policy": (policy, Stamped(3)), "env.value_net": (schemes[1], Stamped(4))})
    assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([3] * 3, [4] * 3)


def test_all_models_get_one_version_and_each_can_still_be_sent_alone(fleet):
    policy, value = fleet.open("policy"), fleet.open("env.value_net")
    assert send_together({policy: Stamped(1), value: Stamped(1)}) == 1
    assert [value.send(Stamped(2)), policy.send(Stamped(3)), policy.send(Stamped(4))] == [2, 2, 3]
    assert send_together({policy: Stamped(5), value: Stamped(5)}) == 4
    assert (policy.version, value.version) == (4, 4)
    assert fleet.versions("policy") == fleet.versions("env.value_net") == [4, 4, 4]
    assert fleet.stamps("policy") == fleet.stamps("env.value_net") == [5, 5, 5]


def test_models_can_be_sent_together_to_some_workers(fleet):
    policy, value = fleet.open("policy", alone=True), fleet.open("env.value_net", alone=True)
    send_together({policy: Stamped(1), value: Stamped(1)}, [0, 2])
    assert fleet.stamps("policy") == fleet.stamps("env.value_net") == [1, 0, 1]


def test_nothing_is_sent_when_one_of_the_models_does_not_fit(fleet):
    policy, value = fleet.open("policy"), fleet.open("env.value_net")
    send_together({policy: Stamped(1), value: Stamped(1)})
    with pytest.raises(ManifestMismatch):
        send_together({policy: Stamped(2), value: Stamped(2, width=9)})
    assert fleet.stamps("policy") == fleet.stamps("env.value_net") == [1, 1, 1]
    send_together({policy: Stamped(3), value: Stamped(3)})
    assert fleet.stamps("policy") == fleet.stamps("env.value_net") == [3, 3, 3]


def test_nothing_is_sent_when_a_worker_does_not_come(fleet):
    policy, value = fleet.open("policy"), fleet.open("env.value_net")
    send_together({policy: Stamped(1), value: Stamped(1)})
    fleet.hold(1)
    with naming(AckTimeout, [1], match=r"nothing was sent: worker 1 .*did not come to receive\(\) in time"):
        send_together({policy: Stamped(2), value: Stamped(2)}, timeout=0.3)
    assert fleet.stamps("policy") == fleet.stamps("env.value_net") == [1, 1, 1]
    fleet.release(1)
    send_together({policy: Stamped(3), value: Stamped(3)})
    assert fleet.stamps("policy") == fleet.stamps("env.value_net") == [3, 3, 3]


@in_processes
def test_a_worker_that_does_not_come_and_one_that_is_dead_are_both_named(fleet):
    policy, value = fleet.open("policy"), fleet.open("env.value_net")
    send_together({policy: Stamped(1), value: Stamped(1)})
    fleet.hold(2)
    fleet.workers[1].kill()
    with pytest.raises(AckTimeout, match="nothing was sent: worker 2.*dead: worker 1") as late:
        send_together({policy: Stamped(2), value: Stamped(2)}, timeout=0.5)
    assert sorted(late.value.missing) == [1, 2]
    fleet.release(2)
    with naming(WorkerDied, [1]):
        send_together({policy: Stamped(3), value: Stamped(3)}, timeout=60)
    assert fleet.stamps("policy", [0, 2]) == fleet.stamps("env.value_net", [0, 2]) == [3, 3]


def test_a_pending_send_is_a_runtime_error(fleet):
    policy, value = fleet.open("policy"), fleet.open("env.value_net")
    value.send_async(Stamped(1))
    with pytest.raises(RuntimeError, match=r"wait_async\(\) first"):
        send_together({policy: Stamped(2), value: Stamped(2)})
    value.wait_async()
    assert fleet.stamps("policy") == [0, 0, 0]


def test_senders_with_other_workers_are_a_value_error(fleet):
    policy, other = fleet.open("policy"), fleet.make()
    fleet.init_sender(other, "env.value_net", pipes=fleet.pipes[:2])
    with pytest.raises(ValueError, match="reach different workers"):
        send_together({policy: Stamped(1), other: Stamped(1)})
    assert fleet.stamps("policy") == [0, 0, 0]


@only(SHM)
def test_model_that_is_not_synchronised_is_left_out(fleet):
    policy, idle = fleet.open("policy"), NoWeightSyncScheme()
    idle.init_on_sender("env.value_net")
    assert send_together({policy: Stamped(1), idle: Stamped(1)}) == 1
    assert fleet.stamps("policy") == [1, 1, 1]


def test_something_else_than_senders_is_a_value_error():
    with pytest.raises(ValueError, match="senders or schemes"):
        send_together({"policy": Stamped()})
    with pytest.raises(ValueError, match="no model"):
        send_together({})
