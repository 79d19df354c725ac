"""collector.verify(): the workers' policies hold what was sent to them."""

import pytest

import shmsync
from support.environments.basic import SCHEMES, Drifting, Policy


@pytest.mark.parametrize(("scheme", "sync"), list(zip(SCHEMES, [True, False], strict=True)))
def test_workers_prove_what_they_hold(collector, scheme, sync):
    policy = Policy()
    batches = collector(policy=policy, sync=sync, weight_sync_scheme=scheme(checksum=True))
    for tag in (1, 2):
        next(batches)
        policy.set_tag(tag)
        version = batches.update_policy_weights_()
        proof = batches.verify()
        assert (proof.version, proof.workers) == (version, (0, 1))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_policy_that_goes_its_own_way_is_found(collector, scheme):
    batches = collector(policy=Drifting(), weight_sync_scheme=scheme(checksum=True))
    batches.update_policy_weights_()
    next(batches)
    with pytest.raises(shmsync.NotDelivered, match="calls") as error:
        batches.verify()
    assert error.value.missing == [0, 1]
