"""Numbers that a collector is given: whatever counts as a whole number, and nothing else, before a process starts."""

from __future__ import annotations

import math

import numpy as np
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


@pytest.mark.parametrize("kind", [np.int64, torch.tensor], ids=["numpy", "tensor"])
def test_whole_numbers_of_any_library_count(collector, kind):
    options = {"num_workers": 2, "frames_per_batch": 40, "envs_per_worker": 2, "total_frames": 80, "seed": 3}
    batches = collector(Counting, Constant(), max_lag=kind(1), **{name: kind(value) for name, value in options.items()})
    assert [batch.batch_size for batch in batches] == [(4, 10)] * 2
    assert type(batches.stats().frames) is int
