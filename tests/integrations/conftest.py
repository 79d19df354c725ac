"""TorchRL's own collectors, with real worker processes."""

from __future__ import annotations

import pytest


def pytest_pycollect_makemodule():
    pytest.importorskip("torchrl", reason="these tests need TorchRL, which shmsync[torchrl] brings")


@pytest.fixture
def collector():
    """collector(policy, ...) -> a collector of two workers; see parts.collectors()."""
    from support.torchrl import parts  # needs TorchRL

    with parts.collectors() as make:
        yield make
