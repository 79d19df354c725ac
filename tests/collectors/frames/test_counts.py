"""Numbers that a collector is given: whatever counts as a whole number, and nothing else, before a process starts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support.environments.basic import Constant, Counting
from support.processes import workers

NAMES = ["num_workers", "frames_per_batch", "envs_per_worker", "total_frames", "seed", "max_lag"]


@pytest.mark.parametrize("value", [2.0, np.float64(4), True, np.bool_(True), "2", [2], torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_whole_number_is_refused_by_name_and_value(collector, name, value):
    before = workers()
    with pytest.raises(TypeError, match=f"{name} is a whole number") as caught:
        collector(Counting, Constant(), **{name: value})
    assert repr(value) in str(caught.value)
    assert workers() <= before


@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("total_frames", -2), ("max_lag", -1), ("seed", 1 << 63)])
def test_numbers_out_of_range_are_refused_by_name_and_value(collector, name, value):
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        collector(Counting, Constant(), **{name: value})


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_whole_numbers_of_any_library_count(collector, kind):
    options = {"num_workers": 2, "frames_per_batch": 40, "envs_per_worker": 2, "total_frames": 80, "seed": 3}
    batches = collector(Counting, Constant(), max_lag=kind(1), **{name: kind(value) for name, value in options.items()})
    assert [batch.batch_size for batch in batches] == [(4, 10)] * 2
    assert type(batches.stats().frames) is int


@pytest.mark.parametrize("name", ["timeout", "start_timeout"])
@pytest.mark.parametrize("value", ["2", True, -1, math.nan], ids=repr)
def test_what_is_no_time_is_refused(collector, name, value):
    before = workers()
    with pytest.raises(ValueError, match="timeout") as caught:
        collector(Counting, Constant(), **{name: value})
    assert repr(value) in str(caught.value)
    assert workers() <= before


def test_none_is_the_default_time(collector):
    assert len(next(collector(Counting, Constant(), timeout=None, start_timeout=None))) == 2
