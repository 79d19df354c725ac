"""Subscribers: attaching, waiting, snapshots and closing, in one process."""

from __future__ import annotations

import pickle

import pytest
import torch

import shmsync
from support.processes import descriptors, segment_path
from support.weights import put


def test_read_version_gives_exactly_that_version_or_an_error(pair):
    pub, sub = pair(2)
    put(pub, 1)
    with sub.read(version=2) as section:
        assert section.version == 2
        with pytest.raises(shmsync.ProtocolError), sub.read(version=1):
            pass
    with pytest.raises(shmsync.ProtocolError, match="gone"), sub.read(version=1):
        pass
    with pytest.raises(shmsync.PublishTimeout), sub.read(version=9, timeout=0.05):
        pass
    with sub.read():  # usable after each refusal
        pass


def test_a_closed_subscriber_frees_its_row_and_its_views_stay(pair, subscriber):
    pub, sub = pair(max_readers=1)
    view = sub.weights["t"]
    before = descriptors()
    for _ in range(5):
        with pytest.raises(shmsync.ReaderTableFull, match="max_readers"):
            shmsync.Subscriber(pub.handle)
    assert descriptors() == before
    sub.close()
    with pytest.raises(shmsync.ClosedError), sub.read():
        pass
    subscriber(pub)
    del sub
    assert view.tolist() == [0] * 4


def test_attach_arguments(publisher):
    pub = publisher({"t": torch.ones(1)})
    with pytest.raises(ValueError, match="worker"):
        shmsync.Subscriber(pub.handle, worker=-1)
    with pytest.raises(shmsync.ArenaNotFound, match="no arena 'nobody'"):
        shmsync.attach("nobody", timeout=0)
    with shmsync.attach(pub.name) as sub:
        assert sub.name == pub.name


def test_a_segment_that_a_cleaner_has_removed(publisher, subscriber):
    pub = publisher({"t": torch.ones(1)})
    sub = subscriber(pub)
    segment_path(pub.name).unlink()
    with pytest.raises(shmsync.ArenaNotFound, match="a cleaner has removed"):
        shmsync.Subscriber(pub.handle)
    assert sub.wait_version(pub.publish({"t": torch.zeros(1)})) == 2
    pub.close()


def test_handles_are_not_pickled_by_mistake(pair):
    pub, sub = pair()
    assert pickle.loads(pickle.dumps(pub.handle)) == pub.handle
    for handle in (pub, sub):
        with pytest.raises(TypeError, match="handle"):
            pickle.dumps(handle)
