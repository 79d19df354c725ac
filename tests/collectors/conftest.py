"""Collectors of real Gymnasium environments in real processes."""

import pytest


def pytest_pycollect_makemodule():
    pytest.importorskip("gymnasium", reason="collectors need gymnasium, which shmsync[collectors] brings")


@pytest.fixture
def collector():
    """Makes collectors, and ends them."""
    from shmsync.collectors import MultiprocessCollector  # needs Gymnasium
    from support.environments.basic import Policy, cartpole

    made = []

    def make(env=cartpole, policy=None, **options):
        options = {"num_workers": 2, "frames_per_batch": 40, **options}
        made.append(MultiprocessCollector(env, Policy() if policy is None else policy, **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
