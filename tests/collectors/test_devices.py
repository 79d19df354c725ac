"""device= of a collector: where the policies of its workers compute, and their weights lie."""

import os

import pytest
import torch

from shmsync.collectors import MultiprocessCollector
from shmsync.collectors.policy_packing import bring, pack
from shmsync.errors import DeviceFailed
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
    ("device", "error", "words"),
    [
        (["cpu"] * 3, ValueError, r"is for 3 workers, but there are 2"),
        ("mps", ValueError, "cannot lie on 'mps'"),
        ([None, 7], TypeError, "not 7"),
        ("nowhere", ValueError, "'nowhere', which is no device"),
        ("cuda", DeviceFailed, "CUDA"),
    ],
)
def test_a_device_that_cannot_be_is_refused_before_a_process_starts(device, error, words):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("with a GPU, weights can lie on cuda")
    before = segments()
    with pytest.raises(error, match=words):
        MultiprocessCollector(environments.cartpole, Policy(), num_workers=2, frames_per_batch=40, device=device)
    assert segments() == before


def test_the_policy_travels_without_its_device_and_is_brought_to_another():
    import cloudpickle

    first, second = Simulated(1, 0.0005), Simulated(2, 0.0005, index=1)
    with installed(first, second):
        policy = torch.nn.BatchNorm1d(3)
        policy.register_buffer("scale", torch.ones(2))
        policy.again = torch.nn.Module()
        policy.again.register_buffer("scale", policy.scale)
        policy.again.weight = policy.weight
        policy.kept = [policy.scale, policy.weight]
        bring(policy, first.name)
        for tensor in policy.state_dict().values():
            tensor.fill_(2)
        with first.on(first.stream()):
            first.kernel(lambda: policy.running_mean.data.fill_(5))
            packed = pack(policy, values=True)
        with installed(second):
            there = cloudpickle.loads(packed)
            assert {str(tensor.device) for tensor in (*there.parameters(), *there.buffers())} == {"cpu"}
            bring(there, second.name)
            assert {str(tensor.device) for tensor in (*there.parameters(), *there.buffers())} == {second.name}
            assert there.scale is there.again.scale is there.kept[0]
            assert there.weight is there.again.weight is there.kept[1]
            bring(there, "cpu")
            assert str(there.weight.device) == "cpu"
            assert set(there.running_mean.tolist()) == {5.0}
            assert set(there.weight.tolist()) == {2.0}


@simulated
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
@pytest.mark.parametrize("device", ["simulated:1", ["cpu", "simulated:1"]], ids=str)
def test_every_frame_is_by_the_weights_of_its_version_on_each_device(collector, scheme, device):
    policy = Policy()
    policy.set_tag(1)
    batches = collector(policy=policy, weight_sync_scheme=scheme(), device=device, total_frames=400)
    for sent, batch in enumerate(batches, 1):
        for key in ("tag", "low", "high"):
            assert torch.equal(batch[key].long(), batch["policy_version"]), key
        policy.set_tag(sent + 1)
        assert batches.update_policy_weights_() == sent + 1


@simulated
def test_the_scheme_says_where_if_the_collector_does_not(collector):
    scheme = SharedMemWeightSyncScheme(device=["simulated:1", "simulated:0"])
    batches = collector(weight_sync_scheme=scheme, total_frames=80)
    assert sum(batch.numel() for batch in batches) == 80
    publishers = scheme.create_carrier().publishers
    assert sorted(publishers.publisher("policy", group)._writer.arena.place for group in (0, 1)) == [
        "simulated:0",
        "simulated:1",
    ]
