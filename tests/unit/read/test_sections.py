"""Read sections and the publisher: who waits for whom, and for how long."""

from __future__ import annotations

import pytest

import shmsync
from support.weights import put


@pytest.mark.parametrize("slots", [2, 3])
def test_a_pinned_section_keeps_its_version_while_the_publisher_goes_on(pair, slots):
    pub, sub = pair(slots)
    with sub.read() as section:
        if slots == 2:
            put(pub, 1)
        else:
            for value in range(1, 6):
                put(pub, value)
        assert section.version == 1
        assert section.weights["t"].tolist() == [0] * 4
        with sub.read() as inner:  # nested: the outermost decides
            assert inner.version == 1
        assert not sub.refresh()
    assert sub.refresh()
    assert sub.version == pub.version


def test_a_reader_waits_at_the_gate_and_gives_up_at_its_deadline(pair):
    pub, sub = pair()
    with pub.update() as weights:
        weights["t"].fill_(1)
        with pytest.raises(shmsync.WriterBusy), sub.read(timeout=0.05):
            pass
        assert not sub.refresh()
    with sub.read() as section:
        assert section.version == 2
