"""A rank in a separate process, with the worker's end alone: what it does in test_rank_ends.py."""

from __future__ import annotations

import math

from torch.distributed import FileStore

from shmsync.schemes.remote.distributed.rank_inbox import Inbox


def listen(state, path):
    state.inbox = Inbox(FileStore(path, 2), 1)
    state.inbox.introduce()


def answer_all(state):
    while True:
        state.inbox.answer(state.inbox.next(math.inf))
