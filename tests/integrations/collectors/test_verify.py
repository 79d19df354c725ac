"""ShmWeightSyncScheme.verify() with TorchRL's own collectors."""

from __future__ import annotations

from torchrl.collectors import MultiAsyncCollector

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.policies import Tagged


def test_every_worker_proves_what_its_policy_holds(collector):
    policy, scheme = Tagged(), ShmWeightSyncScheme(checksum=True)
    collecting = collector(policy, kind=MultiAsyncCollector, scheme=scheme)
    batches = iter(collecting)
    for tag in (1, 2):
        policy.set(tag)
        collecting.update_policy_weights_()
        assert scheme.verify().workers == (0, 1)  # while they step, or wait
        next(batches)
        assert scheme.verify().workers == (0, 1)
