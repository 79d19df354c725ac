"""Optimistic and live reads, and run(), which repeats what was torn."""

from __future__ import annotations

import pytest

from support.weights import put


def test_optimistic_sections_never_hold_the_publisher_up_and_say_they_were_torn(pair):
    pub, sub = pair(consistency="optimistic")
    with sub.read() as section:
        put(pub, 1)
    assert section.torn
    with sub.read() as section:
        pass
    assert not section.torn
    assert sub.stats().torn == 1


@pytest.mark.parametrize("slots", [1, 2])
def test_run_repeats_torn_calls_and_takes_a_pin_in_the_end(pair, slots):
    pub, sub = pair(slots, consistency="optimistic")
    pins = []

    def disturbed():
        pins.append(pub.readers()[0].pinned)
        if len(pins) <= 3:
            for _ in range(slots):  # the last one into the slot of this call
                put(pub, len(pins))
        return sub.weights["t"].tolist()

    assert sub.run(disturbed) == [3.0] * 4
    assert pins == [None, None, None, pub.version]


def test_run_repeats_an_exception_that_torn_weights_caused(pair):
    pub, sub = pair(consistency="optimistic")
    calls = []

    def fails_once():
        calls.append(1)
        if len(calls) == 1:
            put(pub, 1)
            raise FloatingPointError
        return "fine"

    assert sub.run(fails_once) == "fine"
    with pytest.raises(KeyError):
        sub.run(lambda: {}["x"])
