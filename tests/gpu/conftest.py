"""Tests that need NVIDIA GPUs: `make test-gpu`. Elsewhere each of them is skipped, and says what is missing."""

import os
from contextlib import suppress

import pytest
import torch

from shmsync.memory.cuda.visible import reason

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of inductor's would count as processes that are left
with suppress(ImportError):  # by which inductor shows its progress: its thread would count as left
    from tqdm import tqdm

    tqdm.monitor_interval = 0


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item):
    """Of a test in this folder. reason() initialises CUDA, so it is not asked before one of them runs."""
    missing, needed = reason(), 2 if item.get_closest_marker("two_gpus") else 1
    if missing is not None:
        pytest.skip(f"no GPU can be used: {missing}")
    if (count := torch.cuda.device_count()) < needed:
        pytest.skip(f"{needed} GPUs are needed, {count} are there")


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.fixture
def hold():
    """hold(stream) keeps a stream busy for a while, some hundred milliseconds: what comes next on it is done later."""

    def keep_busy(stream=None, cycles=500_000_000):
        with torch.cuda.stream(stream or torch.cuda.current_stream()):
            torch.cuda._sleep(cycles)

    return keep_busy
