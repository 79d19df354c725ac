"""A collector leaves nothing behind, also without a shutdown(); what it holds does not grow with the weights."""

from __future__ import annotations

import contextlib
import gc
import os
import threading

import pytest
from torchrl.collectors import MultiSyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import segments
from support.torchrl import parts, policies
from support.torchrl.environments import Steps
from support.torchrl.policies import Tagged


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def start():
    """Collectors that only the test ends."""
    with parts.collectors(), parts.starting():  # the first only looks for processes that are left

        def make(policy, scheme):
            schemes = {"policy": scheme}
            options = {"frames_per_batch": 20, "total_frames": -1}
            return MultiSyncCollector([Steps] * 2, policy, weight_sync_schemes=schemes, **options)

        yield make


def held():
    """What this process holds."""
    gc.collect()
    return {
        "threads": threading.active_count(),
        "files": open_files(),
        "segments": len(segments()),
        "children": len(parts.server.workers()),
    }


def use(collecting, policy):
    next(iter(collecting))
    policy.set(1)
    collecting.update_policy_weights_()
    collecting.update_policy_weights_(worker_ids=[0])


def test_round_after_round_nothing_is_left(start):
    after = []
    for _ in range(3):
        policy, scheme = Tagged(), ShmWeightSyncScheme(per_worker_weights=True)
        collecting = start(policy, scheme)
        use(collecting, policy)
        assert len(segments()) >= 1
        processes = collecting.procs
        del collecting, scheme, policy
        gc.collect()
        for process in processes:
            with contextlib.suppress(ValueError):  # TorchRL has closed it
                process.join()
        del processes, process
        after.append(held())
    assert after[1] == after[2], after
    assert after[-1]["segments"] == 0 and after[-1]["children"] == 0


def test_nothing_is_sent_after_the_shutdown(collector):
    collecting = collector(Tagged())
    scheme = collecting._weight_sync_schemes["policy"]
    scheme.shutdown()
    scheme.shutdown()
    assert segments() == []
    with pytest.raises(shmsync.ClosedError, match="shut down"):
        collecting.update_policy_weights_()
    assert parts.tags(collecting) == [0, 0]  # the workers go on with what they have
    assert policies.seen(next(iter(collecting))).unique().tolist() == [0]
