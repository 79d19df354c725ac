"""Ray, for all tests that need no more than one node of it."""

import pytest


@pytest.fixture(scope="session")
def one_ray():
    from support import ray_parts

    with ray_parts.one_node():
        yield
