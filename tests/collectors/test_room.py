"""A collector that needs more memory than there is: NoSpace, with both numbers, before anything is taken."""

from __future__ import annotations

import pytest

import shmsync
from support.environments.basic import Constant, Counting, Enormous, Huge, Wide
from support.processes import segments, workers

NUMBERS = r"need [\d,]+ bytes but [\d,]+ are available"


def test_batches_that_cannot_fit_are_refused_before_a_process_is_started(collector):
    before = workers()
    with pytest.raises(shmsync.NoSpace, match=NUMBERS):
        collector(Counting, Constant(), frames_per_batch=400_000_000_000)
    assert workers() <= before


@pytest.mark.parametrize(
    ("env", "policy", "frames"),
    [
        (Wide, Constant, 40_000_000),  # known when the workers have said what a frame is
        (Huge, Constant, 2),
        (Counting, Enormous, 2),
    ],
)
def test_what_is_found_out_later_leaves_nothing_either(collector, env, policy, frames):
    before = workers()
    with pytest.raises(shmsync.NoSpace, match=NUMBERS):
        collector(env, policy(), frames_per_batch=frames)
    assert not segments()
    assert workers() <= before
