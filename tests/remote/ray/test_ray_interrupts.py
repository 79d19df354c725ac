"""Ctrl-C at any moment of a call over Ray, and two threads in one: every actor stays usable, the next send is exact.

test_remote_interrupts.py and test_remote_threads.py do the same over RPC and torch.distributed.
"""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

from support.processes import until
from support.remote import parts, ray_trainer, storms, threads

LONGEST = 0.015  # seconds after which one comes at most: a send takes some 5 ms
pytestmark = pytest.mark.full


def all_is_well(ray_driver):
    assert ray_driver.call(parts.dead) == []
    version = ray_driver.call(parts.send, 0.5)
    assert ray_driver.call(ray_trainer.look) == [(0.5, version)] * 2


@pytest.mark.parametrize(("fan_out", "how"), [("node", "send"), (None, "send_async")])
def test_in_a_send_and_in_init_on_sender_and_shutdown(ray_driver, fan_out, how):
    ray_driver.call(ray_trainer.open_sender, fan_out, 2)
    assert ray_driver.call(storms.storm_of_sends, how, LONGEST) == []
    ray_driver.call(parts.settle)
    all_is_well(ray_driver)
    assert ray_driver.call(ray_trainer.storm_of_beginnings, LONGEST) == []
    all_is_well(ray_driver)
    until(lambda: ray_driver.call(ray_trainer.relays) <= 1)


def test_a_transport_interrupted_and_in_two_threads(ray_driver):
    ray_driver.call(ray_trainer.open_sender, None, 2)
    ray_driver.call(ray_trainer.open_transport, 60.0)
    assert ray_driver.call(storms.storm_at_a_transport, LONGEST) == []
    all_is_well(ray_driver)
    assert ray_driver.call(threads.send_over_one_transport, 2, 10) == [[], []]
    assert ray_driver.call(threads.refuse_in_the_same_thread) == ["WriterBusy"]
    assert ray_driver.call(ray_trainer.look)[0][0] == 7.0
