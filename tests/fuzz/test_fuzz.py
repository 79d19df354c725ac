"""A short run of each fuzzer, and that each finds a check that is left out. `make fuzz` runs them for longer."""

import zlib

import pytest

from shmsync.memory import manifest
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


LEFT_OUT = {  # a check of manifests, with what believes everything in its place
    "keys": ("_check_keys", lambda leaves: None),
    "sizes": ("_number", int),
    "strides": ("dense", lambda shape, strides: True),
}


@pytest.mark.parametrize("check", LEFT_OUT)
def test_a_check_that_is_left_out_is_found(check, monkeypatch):
    monkeypatch.setattr(manifest, *LEFT_OUT[check])
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever comes of it
        fuzz.run("manifest", seed=3, inputs=20_000)
    assert type(caught.value).__module__ != "shmsync.errors"
