"""timeout=None of a constructor is its default, in every scheme and transport; math.inf is for ever."""

import math

import pytest

from shmsync.integrations import torchrl
from shmsync.schemes import MPTransport, SharedMemTransport
from support.conformance.table import SCHEMES

MADE = {entry.name: entry.make for entry in SCHEMES}
MADE |= {"MPTransport": lambda **given: MPTransport(None, **given), "SharedMemTransport": SharedMemTransport}


@pytest.mark.parametrize("name", MADE)
def test_none_is_the_default(name):
    make = MADE[name]
    assert make(timeout=None).timeout == make().timeout > 0
    assert make(timeout=math.inf).timeout == math.inf
    with pytest.raises(ValueError, match="0 or more seconds"):
        make(timeout=-1)


def test_none_is_the_default_beside_torchrl():
    pytest.importorskip("torchrl")
    make = torchrl.ShmWeightSyncScheme
    assert make(timeout=None).timeout == make().timeout == 10.0
