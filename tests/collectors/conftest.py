"""Collectors of real Gymnasium environments in real processes."""

import pytest

pytest.importorskip("gymnasium", reason="collectors need gymnasium, which shmsync[collectors] brings")

from shmsync.collectors import MultiprocessCollector
from support.environments import basic as environments
from support.environments.basic import Policy


@pytest.fixture
def collector():
    """Makes collectors, and ends them."""
    made = []

    def make(env=environments.cartpole, policy=None, **options):
        options = {"num_workers": 2, "frames_per_batch": 40, **options}
        made.append(MultiprocessCollector(env, Policy() if policy is None else policy, **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
