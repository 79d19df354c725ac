"""Faults that are put in by hand: a storm must find each of them."""

from __future__ import annotations

import time

import pytest
import torch

from shmsync.schemes.pipes.pipe_carrier import PipeCarrier
from support.storms import storm
from support.storms.judge import Violation
from support.storms.model import Weather, leaf


def no_acks(patch):
    """A send returns when the workers have been told."""
    patch.setattr(PipeCarrier, "collect", lambda self, posted, deadline: None)


def a_torn_leaf(patch):
    """One leaf of what is sent now and then is that of the weights before."""
    become = Weather.become

    def torn(self, number):
        become(self, number)
        if number % 7 == 0:
            with torch.no_grad():
                self.leaves[2].copy_(leaf(number - 1, 2))
        return self

    patch.setattr(Weather, "become", torn)


def a_wrong_name(patch):
    """An error names the neighbour of a dead worker."""
    mark = PipeCarrier.mark

    def wrong(self, posted, outcome):
        mark(self, posted, outcome)
        outcome.dead = {(index + 1) % 3: how for index, how in outcome.dead.items()}

    patch.setattr(PipeCarrier, "mark", wrong)


def a_late_return(patch):
    """A send sleeps over its deadline."""
    collect = PipeCarrier.collect

    def late(self, posted, deadline):
        try:
            collect(self, posted, deadline)
        finally:
            if time.monotonic() > deadline:
                time.sleep(0.5)

    patch.setattr(PipeCarrier, "collect", late)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (no_acks, "computes with|was dead before"),
        (a_torn_leaf, "weights that are"),
        (a_wrong_name, "names worker|does not name|nobody did"),
        (a_late_return, "after its deadline"),
    ],
    ids=lambda value: getattr(value, "__name__", "found"),
)
def test_a_fault_is_found(fault, found, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(Violation, match=found):
        storm.run("multiprocess", 120, seed=5)
