"""Manifests in all shapes, drawn by Hypothesis: what a publisher lays out is read back, anything else is refused."""

import json

import pytest

pytest.importorskip("hypothesis", reason="these shapes need hypothesis, which shmsync[test] brings")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shmsync
from shmsync.memory.manifest import Manifest

KEYS = st.lists(st.text(max_size=5), min_size=1, max_size=3).map(tuple)
SHAPES = st.lists(st.integers(0, 5), max_size=4)
ORDERS = st.tuples(*[st.integers(0, 4)] * 4)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64])
LIMIT = settings(max_examples=150, deadline=None, database=None, derandomize=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


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
    for leaf in made.leaves:
        assert not leaf.nbytes or leaf.strides == tensors[leaf.key].stride()


@LIMIT
@given(JSON)
def test_any_json_is_refused_with_a_typed_error(document):
    with pytest.raises(shmsync.ArenaCorrupt):
        Manifest.from_json(json.dumps({"leaves": [document], "filtered": False}).encode(), 1 << 20)


@LIMIT
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_typed_error(text):
    with pytest.raises(shmsync.ArenaCorrupt):
        Manifest.from_json(text, 1 << 20)
