"""Numbers that a collector is given: whatever counts as a whole number, and nothing else, before a process starts."""

from __future__ import annotations

import math

import pytest
import torch

from support.environments.basic import Constant, Counting
from support.processes import workers


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("num_workers", 2.0, TypeError),
        ("frames_per_batch", "2", TypeError),
        ("envs_per_worker", True, TypeError),
        ("seed", torch.tensor(True), TypeError),
        ("total_frames", -2, ValueError),
        ("max_lag", -1, ValueError),
        ("seed", 1 << 63, ValueError),
        ("timeout", math.nan, ValueError),
        ("start_timeout", True, ValueError),
    ],
)
def test_what_is_no_such_number_is_refused_by_name_and_value(collector, name, value, error):
    before = workers()
    with pytest.raises(error, match="timeout" if "timeout" in name else name) as caught:
        collector(Counting, Constant(), **{name: value})
    assert repr(value) in str(caught.value)
    assert workers() <= before
