"""TorchRL's own collectors, with real worker processes."""

from __future__ import annotations

import pytest

from support.needs import skipped_without

pytest_pycollect_makemodule = skipped_without("torchrl", "these tests need TorchRL, which shmsync[torchrl] brings")


@pytest.fixture
def collector():
    """collector(policy, ...) -> a collector of two workers; see parts.collectors()."""
    from support.torchrl import parts  # needs TorchRL

    with parts.collectors() as make:
        yield make
