"""Read sections and the publisher: who waits for whom, and for how long."""

from __future__ import annotations

import pytest

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
