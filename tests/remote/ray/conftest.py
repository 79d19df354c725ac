"""One Ray and its actors for all tests."""

import pytest


@pytest.fixture(scope="session")
def one_ray():
    from support.remote import ray_parts  # needs Ray

    with ray_parts.one_node():
        yield


@pytest.fixture
def crew(one_ray):
    """Two actors on the test's node, for RayWeightSyncScheme. A test kills none of them."""
    from shmsync import RayWeightSyncScheme
    from support.remote import ray_parts

    return ray_parts.crew(RayWeightSyncScheme(), ["", ""])
