"""Several threads at once over Ray: each call returns or raises in its time, and the next send reaches everybody."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

from support.remote import parts, ray_trainer, threads


@pytest.fixture
def trainer(one_ray, start):
    import ray

    made = start()
    made.call(ray_trainer.connect, ray.get_runtime_context().gcs_address)
    return made


@pytest.mark.parametrize("kind", ray_trainer.KINDS)
def test_one_sender_in_two_threads(trainer, kind):
    trainer.call(ray_trainer.open_sender, kind, 2)
    assert trainer.call(parts.send, 1.0) == 1
    results = trainer.call(threads.send_in_threads, 2, 30, 20.0)
    assert [raised for raised, _ in results] == [[], []]
    version = trainer.call(parts.send, 9.0)
    assert trainer.call(ray_trainer.look) == [(9.0, version)] * 2


@pytest.mark.parametrize("kind", ["ray", "ray-module"])
def test_one_transport_in_two_threads(trainer, kind):
    trainer.call(ray_trainer.open_sender, kind, 1)
    trainer.call(ray_trainer.open_transport, 20.0)
    results = trainer.call(threads.send_over_one_transport, 2, 30, 20.0)
    assert [raised for raised, _ in results] == [[], []]
    assert trainer.call(threads.refuse_in_the_same_thread) == ["WriterBusy"]
    assert trainer.call(ray_trainer.look)[0][0] == 7.0
