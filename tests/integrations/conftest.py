"""TorchRL's own collectors, with real worker processes."""

from __future__ import annotations

import pytest


@pytest.fixture
def collector():
    """collector(policy, ...) -> a collector of two workers; see parts.collectors()."""
    from support.torchrl import parts  # needs TorchRL

    with parts.collectors() as make:
        yield make
