"""Fixtures that every test folder shares."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch

import shmsync.schemes  # noqa: F401  with what it imports

torch.set_num_threads(1)
gc.freeze()  # the million objects of what is imported are not this suite's: collecting after each test stays cheap


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test must leave no arena of this process in /dev/shm, and no thread."""

    def segments() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if name.startswith(f"shmsync.{os.getpid()}-")}

    before, threads = segments(), threading.active_count()
    yield
    gc.collect()
    assert segments() <= before
    assert threading.active_count() <= threads
