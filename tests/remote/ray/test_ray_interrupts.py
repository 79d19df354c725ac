"""Ctrl-C at any moment of a call over Ray, and two threads in one: every actor stays usable, the next send is exact."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

from support.choice import first
from support.processes import until
from support.remote import parts, ray_trainer, storms, threads

LONGEST = 0.015  # seconds after which one comes at most: a send takes some 5 ms


def all_is_well(ray_driver):
    assert ray_driver.call(parts.dead) == []
    version = ray_driver.call(parts.send, 0.5)
    assert ray_driver.call(ray_trainer.look) == [(0.5, version)] * 2


@pytest.mark.full  # conformance/trouble interrupts sends of the other schemes in the same code
@pytest.mark.parametrize("how", first(["send", "send_async"]))
@pytest.mark.parametrize("kind", first(ray_trainer.KINDS))
def test_in_a_send(ray_driver, kind, how):
    ray_driver.call(ray_trainer.open_sender, kind, 2)
    assert ray_driver.call(storms.storm_of_sends, how, LONGEST) == []
    ray_driver.call(parts.settle)
    all_is_well(ray_driver)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ray", "ray-module"])
def test_in_a_send_of_a_transport(ray_driver, kind):
    ray_driver.call(ray_trainer.open_sender, kind, 2)
    ray_driver.call(ray_trainer.open_transport, 60.0)
    assert ray_driver.call(storms.storm_at_a_transport, LONGEST) == []
    all_is_well(ray_driver)


@pytest.mark.full
@pytest.mark.parametrize("kind", ray_trainer.KINDS)
def test_in_init_on_sender_and_shutdown(ray_driver, kind):
    ray_driver.call(ray_trainer.open_sender, kind, 2)
    assert ray_driver.call(ray_trainer.storm_of_beginnings, LONGEST) == []
    all_is_well(ray_driver)
    until(lambda: ray_driver.call(ray_trainer.relays) <= 1)


@pytest.mark.full  # conformance/trouble/test_threads.py has two threads over each scheme
@pytest.mark.parametrize("kind", first(["ray", "ray-module"]))
def test_one_transport_in_two_threads(ray_driver, kind):
    ray_driver.call(ray_trainer.open_sender, kind, 1)
    ray_driver.call(ray_trainer.open_transport, 20.0)
    assert ray_driver.call(threads.send_over_one_transport, 2, 10) == [[], []]
    assert ray_driver.call(threads.refuse_in_the_same_thread) == ["WriterBusy"]
    assert ray_driver.call(ray_trainer.look)[0][0] == 7.0
