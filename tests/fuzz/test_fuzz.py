"""A short run of each fuzzer; `make fuzz` runs them for longer."""

import zlib

import pytest

from support.fuzz import fuzz
from support.fuzz.targets import TARGETS

INPUTS = 3000
MEMORY = 64 << 20  # bytes that no input may make this process take; a size that is believed takes far more, or fails


@pytest.mark.parametrize("of", TARGETS)
def test_what_is_nearly_right_is_read_or_refused(of):
    found = fuzz.run(of, seed=zlib.crc32(of.encode()) % 1000, inputs=INPUTS)
    assert found["inputs"] == INPUTS
    assert found["memory"] < MEMORY
    assert found["read"] > 0  # some get past all checks, so all of them were reached
