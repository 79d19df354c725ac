"""Manifests in all shapes, drawn by Hypothesis: what a publisher lays out is read back."""

import json

import pytest

pytest.importorskip("hypothesis", reason="these shapes need hypothesis, which shmsync[test] brings")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmsync.memory.manifest import Manifest

KEYS = st.lists(st.text(max_size=5), min_size=1, max_size=3).map(tuple)
SHAPES = st.lists(st.integers(0, 5), max_size=4)
ORDERS = st.tuples(*[st.integers(0, 4)] * 4)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64])
LIMIT = settings(max_examples=150, deadline=None, database=None, derandomize=True)


def without_clashes(keys):
    return [key for key in keys if not any(other != key and other[: len(key)] == key for other in keys)]


@LIMIT
@given(
    st.lists(st.tuples(KEYS, SHAPES, DTYPES, ORDERS), max_size=8, unique_by=lambda each: each[0]), *[st.booleans()] * 2
)
def test_what_is_laid_out_is_read_back(leaves, filtered, checksum):
    keys = without_clashes([key for key, _, _, _ in leaves])
    tensors = {
        key: torch.zeros(shape, dtype=dtype).permute(sorted(range(len(shape)), key=lambda d: (order[d], d)))
        for key, shape, dtype, order in leaves
        if key in keys
    }
    made = Manifest.of(tensors, filtered=filtered, checksum=checksum)
    assert Manifest.from_json(made.to_json(), made.slot_bytes) == made
    for entry, leaf in zip(json.loads(made.to_json())["leaves"], made.leaves, strict=True):
        assert not leaf.nbytes or leaf.strides == tensors[leaf.key].stride()
        assert (len(entry) == 6) == (leaf.strides != torch.empty(leaf.shape, device="meta").stride())
