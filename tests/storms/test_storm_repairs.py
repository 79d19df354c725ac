"""A storm goes on after whatever it did to its workers."""

from __future__ import annotations

from types import SimpleNamespace

from support.storms.sky import Sky
from support.storms.storm import Storm
from support.storms.trouble import act


def test_several_deaths_when_nobody_is_left_to_take_their_place():
    sky = Sky(seed=1)
    storm = Storm("distributed", sky)
    try:
        act("kill", storm.lives[0])
        storm.random = SimpleNamespace(random=lambda: 0.1)  # every dead worker is replaced, no trainer for its own sake
        storm.repair()
        assert sky.counts["worker restarts"] == 1 and not storm.can_replace()
        for index in (0, 1):
            act("kill", storm.lives[index])
        storm.repair()
        assert sky.counts["trainer restarts"] == 1
        assert [life.whole for life in storm.lives] == [True] * 3
        storm.end()
    finally:
        storm.close()
        sky.close()
