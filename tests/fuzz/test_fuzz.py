"""A short run of each fuzzer, and that each finds a check that is left out. `make fuzz` runs them for longer."""

import zlib

import pytest

from shmsync.memory import manifest
from shmsync.memory.manifest import Manifest
from shmsync.schemes.link import messages
from shmsync.schemes.remote import packed_weights
from shmsync.schemes.remote.distributed import rank_address
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


def test_each_fuzzer_draws_the_same_inputs_again():
    first, second = (fuzz.run("manifest", seed=5, inputs=500) for _ in range(2))
    assert (first["read"], first["refused"]) == (second["read"], second["refused"])


LEFT_OUT = {  # what is fuzzed, and a check of it with what believes everything in its place
    "keys": ("manifest", manifest, "_check_keys", lambda leaves: None),
    "sizes": ("manifest", manifest, "_number", int),
    "strides": ("manifest", manifest, "dense", lambda shape, strides: True),
    "labels": (
        "packed-weights", packed_weights, "_checked", lambda label, sizes: Manifest.from_json(label.manifest, 2**63)
    ),
    "tags": ("messages", messages, "wrong_with", lambda message: None),
    "addresses": ("ranks", rank_address.ipaddress, "ip_address", str),
}  # fmt: skip


@pytest.mark.parametrize("check", LEFT_OUT)
def test_a_check_that_is_left_out_is_found(check, monkeypatch):
    of, *believing = LEFT_OUT[check]
    monkeypatch.setattr(*believing)
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever comes of it
        fuzz.run(of, seed=3, inputs=20_000)
    assert type(caught.value).__module__ != "shmsync.errors"
