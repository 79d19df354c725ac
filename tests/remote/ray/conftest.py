"""One Ray for the tests that need one node of it, and another one for those that need two."""

import pytest


@pytest.fixture(scope="session")
def one_ray():
    from support.remote import ray_parts  # needs Ray

    with ray_parts.one_node():
        yield


@pytest.fixture(scope="session")
def crew(one_ray):
    """Two actors that no test kills."""
    from shmsync import RayWeightSyncScheme
    from support.remote import ray_parts

    return ray_parts.start(RayWeightSyncScheme(), 2)
