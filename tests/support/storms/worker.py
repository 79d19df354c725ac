"""A worker in a storm: it receives, computes, and notes on the board what it computed with, until the order to end."""

from __future__ import annotations

import os
import time

import torch

from support.storms.board import COMPUTING, EXIT, IDLE, RECEIVING, STOP, Board
from support.storms.model import FINE, GLANCE, TORN

GLANCES = 32  # sections that look at a few elements only, for one that looks at all


def live(state, path, index):
    board = Board(path)
    row = board.row(index)
    row.set("pid", os.getpid())
    newest = dict.fromkeys(state.models, 0)
    try:
        while True:
            command = row.get("command")
            if command == STOP:
                return row.get("forwards")
            if command == EXIT:
                for scheme in state.schemes.values():
                    scheme.shutdown()
                os._exit(0)
            row.set("phase", RECEIVING)
            for receiver in state.receivers.values():
                receiver.receive(timeout=0.002 / len(state.receivers))
            compute(state, row, newest)
            row.set("phase", IDLE)
    finally:
        row.close()
        board.close()


def compute(state, row, newest):
    """A forward of every model, and what it says about the weights."""
    row.set("phase", COMPUTING)
    found = {}
    with torch.no_grad():
        for _ in range(GLANCES):
            for model_id, model in state.models.items():
                look(row, newest, model_id, model(GLANCE))
        start = time.monotonic_ns()
        for model_id, model in state.models.items():
            found[model_id] = model()
    for model_id, seen in found.items():
        look(row, newest, model_id, seen)
    row.forward(start, found["policy"][0])


def look(row, newest, model_id, seen):
    """Note what is the matter with what a forward saw, if anything is."""
    number, matter, leaf = seen
    if matter != FINE:
        row.set("detail", number * 100 + leaf)
        row.add("torn" if matter == TORN else "wrong")
    if number < newest[model_id]:
        row.set("detail", number)
        row.add("backwards")
    newest[model_id] = number
