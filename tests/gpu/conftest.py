"""Tests that need NVIDIA GPUs: `make test-gpu`. Elsewhere each of them is skipped, and says what is missing."""

import os

import pytest
import torch

from shmsync.memory.cuda.visible import reason

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of inductor's would count as processes that are left


def pytest_collection_modifyitems(items):
    missing, count = reason(), torch.cuda.device_count()
    for item in items:
        if "/gpu/" not in str(item.path):
            continue
        item.add_marker(pytest.mark.gpu)
        needed = 2 if item.get_closest_marker("two_gpus") else 1
        if missing is not None:
            item.add_marker(pytest.mark.skip(reason=f"no GPU can be used: {missing}"))
        elif count < needed:
            item.add_marker(pytest.mark.skip(reason=f"{needed} GPUs are needed, {count} are there"))


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
