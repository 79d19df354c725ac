"""One Ray for the tests that need one node of it, and another one for those that need two.

Each runs in one process of pytest-xdist (`--dist loadgroup`), since a process has one Ray at a time.
"""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            nodes = item.path.name == "test_two_nodes.py"
            item.add_marker(pytest.mark.xdist_group("ray, two nodes" if nodes else "ray"))


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
