"""What a worker does with a module of which the publisher wants a proof: `worker.call(bound, handle, 0)`."""

from __future__ import annotations

import torch
from torch import nn

import shmsync
from support.jobs.engine import attach, bind


def policy():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def bound(state, handle, worker, consistency="pinned"):
    attach(state, handle, worker=worker, consistency=consistency)
    bind(state, policy, train=False)


def sections_for_ever(state):
    """Until the next call."""
    while not state.conn.poll():
        with state.sub.read():
            pass


def refreshes_for_ever(state):
    while not state.conn.poll():
        state.sub.refresh()


def calls_for_ever(state):
    with torch.no_grad():
        while not state.conn.poll():
            state.module(torch.ones(1, 4))


def waits_for_ever(state):
    while not state.conn.poll():
        try:
            state.sub.wait_version(10**6, timeout=0.3)
        except shmsync.PublishTimeout:
            pass


def replace_head(state):
    state.module[2] = nn.Linear(4, 2)


def scribble(state):
    state.module[1].running_mean.add_(1)


def set_data(state):
    state.module[2].weight.data = torch.randn(2, 4)
