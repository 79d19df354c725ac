"""snapshot(): one version in new memory, whose tensors are as if each had been made separately."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int8,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (1,), (0,), (3, 0, 2), (5,), (3, 4), (2, 1, 3), (1, 2, 1, 2, 1, 2)]


def weights():
    made = {
        f"{str(dtype).removeprefix('torch.')}.of{number}": torch.randint(0, 2, shape).to(dtype)
        for dtype in DTYPES
        for number, shape in enumerate(SHAPES)
    }
    return made | {"tied": made["float32.of5"], "deep.deeper.deepest": torch.rand(3), "weight": torch.rand(2)}


def counter(tensor):
    before = tensor._version
    tensor.zero_()
    return tensor._version - before


@pytest.mark.parametrize(("slots", "consistency"), [(1, "pinned"), (2, "optimistic"), (2, "live")])
def test_every_leaf_arrives_as_a_tensor_of_its_own(both, slots, consistency):
    given = weights()
    pub, sub = both(given, slots=slots, consistency=consistency)
    shown = pub.weights
    for _ in range(3):
        taken = sub.snapshot().weights
        assert isinstance(taken, TensorDict) and not taken.is_locked and taken.batch_size == torch.Size([])
        assert list(taken.keys(True, True)) == list(shown.keys(True, True))
        leaves = dict(taken.items(True, True))
        for key, tensor in shown.items(True, True):
            mine = leaves[key]
            assert mine.dtype is tensor.dtype and mine.shape == tensor.shape and mine.is_contiguous()
            assert mine.tolist() == tensor.tolist()
            assert not mine._is_view() and mine.is_leaf and not mine.requires_grad and not mine.is_inference()
            assert torch._C._dispatch_keys(mine) == torch._C._dispatch_keys(torch.zeros(1))
        assert counter(leaves["float32", "of4"]) == 1
        assert leaves["float32", "of5"]._version == 0  # a write into one is no write into another
        leaves["tied"].fill_(7)
        assert torch.equal(leaves["float32", "of5"], given["tied"])
