"""first_version=: a trainer that starts again goes on counting; and the stamp of what a section used."""

from __future__ import annotations

import pickle

import pytest
import torch

import shmsync
from shmsync import _native


@pytest.mark.parametrize("slots", [1, 2])
def test_versions_begin_where_they_are_told_to(publisher, subscriber, slots):
    pub = publisher({"t": torch.ones(2)}, slots=slots, first_version=41)
    assert pub.version == 41
    sub = subscriber(pub)
    assert (sub.version, sub.latest, sub.lag) == (41, 41, 0)
    assert pub.publish({"t": torch.zeros(2)}) == 42
    with sub.read(version=42, timeout=5) as section:
        assert section.weights["t"].tolist() == [0, 0]
    with pytest.raises(shmsync.ProtocolError, match="version 41 is gone"), sub.read(version=41):
        pass


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, _native.MAX_VERSION + 1])
def test_a_wrong_number_is_refused_before_there_is_an_arena(wrong):
    with pytest.raises((ValueError, TypeError), match="first_version is a whole number from 1"):
        shmsync.Publisher({"t": torch.ones(2)}, first_version=wrong)


def test_false_waits_for_no_worker(pair):
    pub, _ = pair()
    assert pub.publish(wait=False, timeout=0.05) == 2
    with pytest.raises(shmsync.AckTimeout), pub.update(wait=True, timeout=0.05):
        pass
    with pytest.raises(ValueError, match="wait is False"):
        pub.publish(wait=1)


def test_a_stamp_names_the_weights_that_a_section_used(pair):
    pub, sub = pair()
    section = sub.read()
    assert section.stamp == (b"", 0)
    with section:
        first = section.stamp
        assert first == shmsync.VersionStamp(pub.handle.session, 1)
    pub.publish()
    assert section.stamp == first  # after its end too
    with sub.read() as later:
        assert later.stamp != first
        assert later.stamp.session == first.session
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(AttributeError):
        first.version = 3
