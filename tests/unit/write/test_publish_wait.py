"""publish(wait=...): whom it waits for, and whom it names."""

from __future__ import annotations

import pytest
import torch

import shmsync


def test_wait_all_with_nobody_there_returns(publisher):
    assert publisher({"t": torch.ones(1)}).publish(wait="all") == 2


def test_a_named_worker_that_never_attached_times_out(publisher):
    with pytest.raises(shmsync.AckTimeout) as error:
        publisher({"t": torch.ones(1)}).publish(wait=[3], timeout=0.05)
    assert error.value.missing == [3]
    assert error.value.version == 2
    assert isinstance(error.value, TimeoutError)


@pytest.mark.parametrize("wait", ["all", True, [7]])
def test_a_subscriber_that_does_not_refresh_is_named(publisher, subscriber, wait):
    pub = publisher({"t": torch.ones(1)})
    sub = subscriber(pub, worker=7)
    with pytest.raises(shmsync.AckTimeout, match=r"is idle, or waits for .* full queue, never does") as error:
        pub.publish(wait=wait, timeout=0.05)
    assert (error.value.missing, error.value.version, pub.version) == ([7], 2, 2)
    sub.refresh()
    with pytest.raises(shmsync.AckTimeout) as error:
        pub.publish(wait=wait, timeout=0.05)
    assert (error.value.missing, error.value.version, pub.version) == ([7], 3, 3)
