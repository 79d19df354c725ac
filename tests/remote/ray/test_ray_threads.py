"""Several threads at once over Ray: each call returns or raises in its time, and the next send reaches everybody."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

from support.remote import ray_trainer, threads


@pytest.mark.parametrize("kind", ["ray", "ray-module"])
def test_one_transport_in_two_threads(ray_driver, kind):
    ray_driver.call(ray_trainer.open_sender, kind, 1)
    ray_driver.call(ray_trainer.open_transport, 20.0)
    assert ray_driver.call(threads.send_over_one_transport, 2, 10) == [[], []]
    assert ray_driver.call(threads.refuse_in_the_same_thread) == ["WriterBusy"]
    assert ray_driver.call(ray_trainer.look)[0][0] == 7.0
