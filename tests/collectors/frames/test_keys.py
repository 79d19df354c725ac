"""Keys of observations and of what a policy returns: those of the first frame each time, or an error names them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

import shmsync
from support.environments.basic import BYTES, Constant, Counting, Odd, Other

ONE = {"num_workers": 1, "frames_per_batch": 40}


@pytest.mark.parametrize("which", ["space", "action"])
def test_a_space_without_a_form_is_refused_when_the_collector_is_made(collector, which):
    env = functools.partial(Odd, **{"space": BYTES, which: spaces.Tuple(())}, reset=np.zeros(3, np.uint8))
    with pytest.raises(TypeError, match="Tuple"):
        collector(env, Constant(), **ONE)


def test_a_key_that_the_policy_returns_later_only_is_refused(collector):
    with pytest.raises(shmsync.DataMismatch, match="'more', which .* first"):
        next(collector(Counting, Other({"more": torch.zeros(1)}, 7), **ONE))
