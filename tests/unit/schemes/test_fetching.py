"""Weights that a worker fetches from a weight server, from shared memory or over a connection. Both ends are here."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from shmsync.errors import WriterDied
from shmsync.schemes.remote import packed_weights
from shmsync.schemes.remote.delivery import APART
from shmsync.schemes.remote.distributed.distributed_scheme import DistributedCarrier
from shmsync.schemes.remote.location import Location, here
from shmsync.schemes.remote.packed_weights import Packer, allow_views
from shmsync.schemes.remote.weight_client import fetch, forget_ended, opened
from support.holdings import mapping_at
from support.processes import until

COUNT = 100_000  # elements of a leaf


def elsewhere() -> Location:
    """As a worker on another node has it."""
    return here("another node")


class Reader:
    """Reads weights."""


class Sender:
    """Packs and ships. Its tickets say that the fetching process is at `where`."""

    def __init__(self, where=here):
        self.packer = Packer(shared_from=APART)
        self.carrier = DistributedCarrier()
        self.where = where

    def ship(self, value, version=1, seconds=math.inf):
        weights = {"a": torch.full((COUNT,), float(value)), "b": torch.full((3,), float(value))}
        packed_weights = self.packer.pack(weights, "policy", version)
        return self.carrier.ship(packed_weights, seconds, lambda start: start(None))

    def ticket(self, delivery):
        return delivery.ticket._replace(where=self.where)


@pytest.fixture(autouse=True)
def only_readers(monkeypatch):
    """The readers of this process are those of the test: another test may have left one that is not collected yet."""
    monkeypatch.setattr(packed_weights, "_readers", weakref.WeakKeyDictionary())


@pytest.fixture
def sender():
    made = Sender()
    yield made
    made.carrier.close()
    gc.collect()
    until(lambda: forget_ended() or True)


@pytest.fixture
def reader():
    made = Reader()
    allow_views(made, "policy")
    return made


def values(weights):
    return {float(tensor.min()) for tensor in weights.values()} | {float(tensor.max()) for tensor in weights.values()}


@pytest.mark.parametrize("where", [here, elsewhere], ids=["near", "far"])
def test_weights_are_fetched_by_views_for_who_only_reads_and_as_a_copy_by_others(sender, where):
    sender.where, reader = where, Reader()
    allow_views(reader, "policy")
    for version in (1, 2, 3):
        delivery = sender.ship(version, version)
        weights = opened(sender.ticket(delivery))
        assert values(weights) == {float(version)} and weights.stamp.version == version
        permissions, _, path = mapping_at(weights["a"].data_ptr())
        assert ("shmsync-weights" in path) == (where is here)
        assert where is elsewhere or permissions == "r--s"
    del reader
    gc.collect()
    weights = fetch(sender.ticket(delivery))
    assert "shmsync-weights" not in mapping_at(weights["a"].data_ptr())[2]
    weights["a"].fill_(7)  # harms no other reader
    assert values(fetch(sender.ticket(delivery))) == {3.0}


def test_the_memory_of_weights_that_somebody_still_reads_is_not_written_again(sender, reader):
    first = sender.ship(1)
    kept = fetch(sender.ticket(first))
    del first
    gc.collect()
    for value in range(2, 8):
        delivery = sender.ship(value)
        assert values(fetch(sender.ticket(delivery))) == {float(value)}
        assert values(kept) == {1.0}


def test_weights_that_were_given_up_are_an_error_that_says_so(sender):
    ticket = sender.ticket(sender.ship(1))
    gc.collect()
    with pytest.raises(WriterDied, match="given these weights up"):
        fetch(ticket)
    delivery = sender.ship(2)
    assert values(fetch(sender.ticket(delivery))) == {2.0}  # over the same connection
