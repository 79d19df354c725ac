"""What native code believes of the memory of tensors: which layouts it takes, and how often it looks."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch
from torch import nn

from shmsync import _native
from shmsync.engine.copy import looking

WORDS = 22  # of a tensor, as far as native code looks


@pytest.fixture(autouse=True)
def learned():
    """Other tests find what this torch's tensors are like."""
    yield
    assert looking.teach()


def made_up(flags, storage):
    """What teach() would say of tensors whose flags and storage stand in these words."""
    kept, probes = [], []
    for number in range(1, 4):
        tensor, memory = (ctypes.c_uint64 * WORDS)(), (ctypes.c_uint64 * 8)()
        address = ctypes.addressof(tensor)
        tensor[flags], tensor[storage] = number, ctypes.addressof(memory)
        memory[1], memory[2] = 4096 * number, 100 + number
        holder = struct.pack("Q", address)  # the fifth word of this object of Python is the address
        kept.append((tensor, memory, holder))
        probes.append((holder, address, number, ctypes.addressof(memory), 4096 * number, 100 + number))
    return kept, probes


@pytest.mark.parametrize(
    ("flags", "storage", "known"),
    [(20, 3, True), (3, 2, True), (21, 20, True), (1, 3, False), (0, 5, False), (20, 1, False), (20, 0, False),
     (5, 12, False), (2, 3, False), (1, 0, False)],
)  # fmt: skip
def test_a_layout_whose_words_would_not_tell_is_not_taken(flags, storage, known):
    kept, probes = made_up(flags, storage)
    assert _native.learn_tensors(probes, [1]) == known
    assert (_native.look(probes[0][0]) == (4096, 101)) == known
    if not known:
        assert _native.look(torch.ones(3)) is None  # so tensors are asked
    del kept


def module(leaves):
    found = nn.Module()
    for number in range(leaves):
        found.register_buffer(f"t{number}", torch.rand(3))
    return found


@pytest.mark.parametrize("how", ["module", "dict"])
def test_a_tensor_that_has_changed_is_looked_at_once(publisher, how):
    leaves = 40
    source = module(leaves)

    def weights():
        return source if how == "module" else dict(source.named_buffers())

    pub = publisher(weights())
    for _ in range(2):
        pub.publish(weights())
    before = _native.tensors_looked_at()
    pub.publish(weights())
    assert _native.tensors_looked_at() == before  # their words tell
    for each in source.buffers():
        each.data = torch.rand(3)
    before = _native.tensors_looked_at()
    pub.publish(weights())
    assert _native.tensors_looked_at() - before == leaves
    assert all(torch.equal(pub.weights[name], each) for name, each in source.named_buffers())
