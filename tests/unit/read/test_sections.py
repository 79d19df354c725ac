"""Read sections and the publisher: who waits for whom, and for how long."""

from __future__ import annotations

import pytest
import torch

import shmsync
from support.calls import elsewhere
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


def test_no_free_slot_raises_and_writes_nothing(publisher, subscriber):
    pub = publisher({"t": torch.zeros(4)}, slots=2)
    sub = subscriber(pub, worker=4)
    with elsewhere(sub.read()):
        put(pub, 1)
        with pytest.raises(shmsync.ReaderStalled) as error:
            pub.publish({"t": torch.ones(4)}, timeout=0.05)
        assert error.value.missing == [4]
        assert pub.version == 2
        assert pub.weights["t"].tolist() == [1] * 4
    assert put(pub, 2) == 3


def test_one_slot_publish_times_out_with_the_gate_open_again(both, subscriber):
    pub, sub = both({"t": torch.zeros(4)})
    other = subscriber(pub)
    with elsewhere(sub.read()):
        with pytest.raises(shmsync.ReaderStalled):
            pub.publish(timeout=0.05)
        with other.read() as section:
            assert section.version == 1


def test_a_reader_waits_at_the_gate_and_gives_up_at_its_deadline(pair):
    pub, sub = pair()
    with pub.update() as weights:
        weights["t"].fill_(1)
        with pytest.raises(shmsync.WriterBusy), sub.read(timeout=0.05):
            pass
        assert not sub.refresh()
    with sub.read() as section:
        assert section.version == 2
