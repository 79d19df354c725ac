from __future__ import annotations

import pytest

import shmsync
from support.weights import stamped


@pytest.fixture
def pub():
    with shmsync.Publisher(stamped(1), slots=2, timeout=120.0) as made:
        yield made
