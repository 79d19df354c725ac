"""snapshot() without out=: one copy into new memory, whose tensors are as if each had been made separately."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from shmsync import _native
from shmsync.engine.read import snapshot as snapshots

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


@pytest.fixture
def copies(monkeypatch):
    """The bytes of every piece that was copied natively, a list for each call."""
    seen = []

    def copy(table):
        seen.append([size for _, _, size in table])
        _native.copy(table)

    class Counted:
        def __getattr__(self, name):
            return copy if name == "copy" else getattr(_native, name)

    monkeypatch.setattr(snapshots, "_native", Counted())
    return seen


def counter(tensor):
    before = tensor._version
    tensor.zero_()
    return tensor._version - before


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("consistency", ["pinned", "optimistic", "live"])
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


@pytest.mark.parametrize("leaves", [1, 50])
def test_each_byte_is_copied_once_and_in_one_call(both, copies, leaves):
    given = {f"leaf.{number}": torch.rand(100 + number) for number in range(leaves)}
    pub, sub = both(given | {"tied": given["leaf.0"]})
    taken = sub.snapshot().weights
    # A tied leaf's second name has its own.
    assert copies == [[leaf.nbytes for leaf in pub._writer.arena.manifest.leaves]]
    assert torch.equal(taken["tied"], given["leaf.0"])
    for leaf in taken.values(True, True):  # each in a separate storage
        assert leaf.untyped_storage().nbytes() == leaf.nbytes and leaf.storage_offset() == 0


def test_what_is_known_of_the_leaves_is_worked_out_once(publisher, subscriber):
    sub = subscriber(publisher({"t": torch.ones(3)}))
    first = sub._reader.arena.fresh
    one, other = sub.snapshot(), sub.snapshot()
    assert sub._reader.arena.fresh is first
    one.weights["t"].zero_()
    assert other.weights["t"].tolist() == [1] * 3
    one.weights["new"] = torch.zeros(1)
    assert "new" not in sub.snapshot().weights


def test_a_snapshot_is_a_tensordict_like_any_other(publisher, subscriber):
    sub = subscriber(publisher({"a.b": torch.ones(2), "c": torch.ones(3, 2)}))
    taken = sub.snapshot().weights
    assert set(taken.flatten_keys(".").keys()) == {"a.b", "c"}
    assert (taken + 1)["a", "b"].tolist() == [2, 2]
    made = TensorDict({"a": TensorDict({"b": torch.ones(2)}, []), "c": torch.ones(3, 2)}, [])
    assert (taken == made).all() and taken.device == made.device and taken.names == made.names
    taken.lock_()
    assert taken["a"].is_locked
    taken.unlock_()["a", "d"] = torch.zeros(1)
    assert taken.clone()["a", "d"].tolist() == [0]
