"""A scheme of shmsync that is for workers of one's own, given to a collector of TorchRL's."""

from __future__ import annotations

import pytest
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

from shmsync.schemes import MultiProcessWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from support.torchrl import parts
from support.torchrl.environments import Steps
from support.torchrl.policies import Tagged

SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, NoWeightSyncScheme]
REFUSED = r"shmsync\.integrations\.torchrl\.ShmWeightSyncScheme"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_collector_in_this_process_refuses_it_with_the_name_of_the_right_one(scheme):
    with pytest.raises(AttributeError, match=REFUSED):
        Collector(Steps, Tagged(), frames_per_batch=4, total_frames=8, weight_sync_schemes={"policy": scheme()})


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_collector_with_workers_refuses_it_with_the_name_of_the_right_one(scheme, kind):
    with parts.collectors() as make, pytest.raises(AttributeError, match=REFUSED):
        make(Tagged(), kind=kind, scheme=scheme())
