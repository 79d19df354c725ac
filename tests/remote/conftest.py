"""Trainers and workers that speak RPC or torch.distributed, and Ray for all tests that need one node of it."""

import os

import pytest

from support.remote import parts


@pytest.fixture
def fleet(start):
    """fleet(2, nodes=...) -> a trainer and workers, see parts.Fleet; they are dead afterwards."""
    made = []

    def new(*args, **kwargs):
        made.append(parts.Fleet(start, *args, **kwargs))
        return made[-1]

    yield new
    for each in made:
        each.end()


@pytest.fixture(params=["rpc", "distributed"])
def kind(request):
    """What the trainer and its workers speak."""
    return request.param


@pytest.fixture(scope="session")
def one_ray():
    from support.remote import ray_parts

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


@pytest.fixture
def ray_driver(one_ray, start):
    """A process that is a driver of this Ray: what an interrupt may hit at any moment."""
    import ray

    from support.remote import ray_trainer

    made = start()
    # The fork server may be older than this Ray, whose token it needs.
    made.call(parts.set_environment, **{name: value for name, value in os.environ.items() if name.startswith("RAY_")})
    made.call(ray_trainer.connect, ray.get_runtime_context().gcs_address)
    return made
