"""A collector that needs more memory than there is: NoSpace, with both numbers, and nothing is left."""

from __future__ import annotations

import pytest

import shmsync
from support.environments.basic import Constant, Counting, Enormous
from support.processes import segments, workers


@pytest.mark.parametrize(("policy", "frames"), [(Constant, 400_000_000_000), (Enormous, 2)], ids=["batches", "weights"])
def test_what_cannot_fit_is_refused_and_leaves_nothing(collector, policy, frames):
    before = workers()
    with pytest.raises(shmsync.NoSpace, match=r"need [\d,]+ bytes but [\d,]+ are available"):
        collector(Counting, policy(), frames_per_batch=frames)
    assert not segments()
    assert workers() <= before
