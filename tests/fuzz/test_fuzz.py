"""A short run of the fuzzer; `make fuzz` runs it for longer."""

from support.fuzz import fuzz

MEMORY = 64 << 20  # bytes that no input may make this process take; a size that is believed takes far more, or fails


def test_what_is_nearly_right_is_read_or_refused():
    found = fuzz.run(seed=7, inputs=3000)
    assert found["memory"] < MEMORY
    assert found["read"] > 0  # some get past all checks, so all of them were reached
