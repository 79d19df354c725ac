"""device= of a collector: where the policies of its workers compute, and their weights lie."""

import os

import pytest
import torch

from shmsync.collectors import MultiprocessCollector
from shmsync.collectors.policy import bring, pack
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.devices.simulated import Simulated, installed
from support.environments import basic as environments
from support.environments.basic import Policy
from support.processes import segments

simulated = pytest.mark.skipif(
    os.environ.get("SHMSYNC_TEST_DEVICE") != "simulated",
    reason="its workers need the simulated device: make test-device",
)


@pytest.mark.parametrize(
    ("device", "words"),
    [(["cpu"] * 3, r"is for 3 workers, but there are 2"), ("nowhere", "'nowhere', which is no device")],
)
def test_a_device_that_cannot_be_is_refused_before_a_process_starts(device, words):
    before = segments()
    with pytest.raises(ValueError, match=words):
        MultiprocessCollector(environments.cartpole, Policy(), num_workers=2, frames_per_batch=40, device=device)
    assert segments() == before


def test_the_policy_travels_without_its_device_and_is_brought_to_another():
    import cloudpickle

    first, second = Simulated(1, 0.0005), Simulated(2, 0.0005, index=1)
    with installed(first, second):
        policy = torch.nn.BatchNorm1d(3)
        policy.again = torch.nn.Module()
        policy.again.weight = policy.weight
        bring(policy, first.name)
        with first.on(first.stream()):
            first.kernel(lambda: policy.running_mean.data.fill_(5))
            packed = pack(policy, values=True)
        with installed(second):
            there = cloudpickle.loads(packed)
            assert {str(tensor.device) for tensor in (*there.parameters(), *there.buffers())} == {"cpu"}
            bring(there, second.name)
            assert {str(tensor.device) for tensor in (*there.parameters(), *there.buffers())} == {second.name}
            assert there.weight is there.again.weight
            bring(there, "cpu")
            assert set(there.running_mean.tolist()) == {5.0}


@simulated
@pytest.mark.parametrize(
    ("scheme", "device"),
    [
        (SharedMemWeightSyncScheme, "simulated:1"),
        (SharedMemWeightSyncScheme, ["cpu", "simulated:1"]),
        (MultiProcessWeightSyncScheme, ["cpu", "simulated:1"]),
    ],
)
def test_every_frame_is_by_the_weights_of_its_version_on_each_device(collector, scheme, device):
    policy = Policy()
    policy.set_tag(1)
    batches = collector(policy=policy, weight_sync_scheme=scheme(), device=device, total_frames=400)
    for sent, batch in enumerate(batches, 1):
        for key in ("tag", "low", "high"):
            assert torch.equal(batch[key].long(), batch["policy_version"]), key
        policy.set_tag(sent + 1)
        assert batches.update_policy_weights_() == sent + 1
