"""ShmWeightSyncScheme without a collector. Real collectors: ../collectors/."""

from __future__ import annotations

import threading

import pytest
import torch

from support.processes import until_waits


@pytest.fixture
def pair():
    from support.torchrl.pair import Pair  # needs TorchRL

    made = []

    def make(*args, **options):
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def in_forward():
    """in_forward(module) calls it in a thread, and returns when it is in its forward, or waits to enter it; what that
    returns lets it out, and gives its output."""
    threads = []

    def start(module, enters=True):
        out = []
        if not enters:
            module.entered.set()

        def call():
            with torch.no_grad():
                out.append(module(torch.ones(1, module.in_features)).mean().item())

        thread = threading.Thread(target=call)
        threads.append((module, thread))
        thread.start()
        if enters:
            assert module.entered.wait(60)
        else:
            until_waits(thread, "call")

        def end():
            module.go.set()
            thread.join()
            return out[0]

        return end

    yield start
    for module, thread in threads:
        module.go.set()
        thread.join()
