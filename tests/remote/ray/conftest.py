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


@pytest.fixture
def by_the_store(monkeypatch):
    """Weights go through Ray's object store, as where workers cannot reach the trainer."""
    from shmsync.schemes.remote.delivery import DeliveryCarrier

    monkeypatch.setattr(DeliveryCarrier, "_find_server", lambda carrier: None)
