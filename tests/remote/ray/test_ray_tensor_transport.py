"""tensor_transport= of the Ray schemes: what Ray's put() is asked for, and what is said where it cannot do it."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray

import shmsync
from shmsync import RayActorTransport, RayModuleTransformScheme, RayTransport, RayWeightSyncScheme
from shmsync.schemes.remote.packing import PackedWeights
from support.remote import ray_parts as parts


@pytest.fixture
def puts(monkeypatch):
    """What ray.put() is called with. It does the rest as without the keyword: this machine lacks the network for it."""
    noted, real = [], ray.put

    def put(value, **options):
        noted.append((value, options))
        return real(value)

    monkeypatch.setattr(ray, "put", put)
    return noted


@pytest.mark.slow
@pytest.mark.parametrize("how", ["transport", "scheme"])
def test_nixl_is_what_put_is_asked_for_and_the_object_store_for_nothing(crew, puts, how):
    scheme = RayWeightSyncScheme(tensor_transport="nixl")
    scheme.init_on_sender("policy", remote_collectors=crew)
    if how == "transport":
        RayTransport(crew[0], "nixl").send_weights("policy", parts.net(3.0).state_dict())
    else:
        for value in (2.0, 3.0):
            scheme.get_sender().send(parts.net(value))
        assert parts.ask(crew, "look") == [(3.0, 2)] * 2
    scheme.shutdown()
    assert [options for _, options in puts] == [{"_tensor_transport": "nixl"}] * (1 if how == "transport" else 2)
    assert all(isinstance(packed_weights, PackedWeights) for packed_weights, _ in puts)
    # The other side may read them at any time, so no two sends share their memory.
    addresses = [packed_weights.buffer.data_ptr() for packed_weights, _ in puts]
    assert len({*addresses}) == len(addresses)
    RayTransport(crew[0]).send_weights("policy", parts.net(3.0).state_dict())
    assert puts[-1][1] == {}


@pytest.mark.slow
def test_a_ray_that_does_not_know_it_is_named(crew, monkeypatch):
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda value: real(value))  # as of a Ray before that
    transport = RayTransport(crew[0], "nixl")
    with pytest.raises(shmsync.ProtocolError, match=rf"Ray {ray.__version__}.*nixl.*object_store.*Nothing was sent"):
        transport.send_weights("policy", parts.net(1.0).state_dict())


def test_another_name_is_refused():
    for make in (RayWeightSyncScheme, RayModuleTransformScheme, RayTransport, RayActorTransport):
        with pytest.raises(ValueError, match=r'"object_store" or "nixl", not \'gloo\''):
            make(tensor_transport="gloo")
