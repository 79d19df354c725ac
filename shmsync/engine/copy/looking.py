"""Teaching native code where this torch keeps a tensor's flags and the size of its storage.

Both must be known of each tensor before its bytes are copied, and asking for them through Python takes 0.6 µs a tensor.
Torch promises no layout of its objects. So their places are found by comparing the memory of tensors made here with
what those say of themselves, and then tried on others; where that fails, each tensor is asked as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ... import _native
from ...memory.torch_modes import plainly
from ..source.leaf_check import PLAIN_KEYS


def teach() -> bool:
    """Teach it; False: tensors are asked."""
    try:
        with plainly():
            return _taught()
    except (AttributeError, RuntimeError, TypeError):  # this torch does not say enough of itself
        forget()
        return False


def forget() -> None:
    """Have native code ask each tensor from now on."""
    _native.learn_tensors([], [])


def _taught() -> bool:
    probes: list[tuple[object, int, int, int, int, int]] = [_probe(tensor) for tensor in _tensors(range(3, 9))]
    if not _native.learn_tensors(probes, sorted(PLAIN_KEYS)):
        return False
    if _right(_tensors(range(11, 17))) and _right_after_changes():
        _native.words_tell(True)
        _native.words_tell(_words_tell())
        return True
    forget()
    return False


def _tensors(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Tensors that differ in size, in where they begin in their storage, and in their flags."""
    made = [torch.zeros(size, dtype=torch.float64, device="cpu") for size in sizes]
    # A storage over memory of others: its address is kept apart from whatever gives that memory back.
    made += [torch.frombuffer(bytearray(8 * size + 16), dtype=torch.float64, offset=8) for size in sizes]
    made += [torch.zeros(2, size, dtype=torch.complex64, device="cpu")[1].conj() for size in sizes]
    made += [torch._neg_view(torch.zeros(size + 40, device="cpu")) for size in sizes]
    with torch.inference_mode():
        made += [torch.zeros(size + 80, device="cpu") for size in sizes]
    return [*made, *(nn.Parameter(torch.zeros(size + 120, device="cpu")) for size in sizes)]


def _flags(tensor: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _probe(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int, int]:
    storage = tensor.untyped_storage()
    return tensor, tensor._cdata, _flags(tensor), storage._cdata, storage.data_ptr(), storage.nbytes()


def _right(tensors: Sequence[torch.Tensor]) -> bool:
    """Is what native code sees of them what they say?"""
    return all(
        _native.look(tensor)
        == ((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) if _is_plain(tensor) else None)
        for tensor in tensors
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return _flags(tensor) in PLAIN_KEYS


def _right_after_changes() -> bool:
    """The same object may show another storage, or a storage have other memory."""
    tensor = torch.zeros(7, device="cpu")
    right = []
    for change in (
        lambda: tensor.untyped_storage().resize_(12),
        lambda: tensor.untyped_storage().resize_(0),
        lambda: tensor.set_(torch.zeros(21, device="cpu").untyped_storage()),
        lambda: setattr(tensor, "data", torch.zeros(35, device="cpu")[3:]),
        lambda: tensor.resize_(70),
        lambda: tensor.requires_grad_(),
    ):
        change()
        right.append(_right([tensor]))
    return all(right)


def _words_tell() -> bool:
    """Does each change that a tensor can go through change its own memory, so that it need not be looked at in full?"""

    def seen(change: Callable[[torch.Tensor], object], dtype: torch.dtype = torch.float32) -> bool:
        tensor = torch.zeros(5, 5, dtype=dtype, device="cpu")[1:4, 1:4]
        return _native.seen_after(tensor, lambda: change(tensor))

    def assign(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], object]:
        return lambda tensor: setattr(tensor, "data", make(tensor))

    changes = [
        assign(lambda t: t.view(torch.int32)), assign(lambda t: t.view(torch.uint32)),
        assign(lambda t: t.t()), assign(lambda t: t[:, :2]), assign(lambda t: t[:2]), assign(lambda t: t[None]),
        assign(lambda t: t.as_strided((3, 3), (5, 1), 7)), assign(lambda t: t.as_strided((3, 3), (0, 1), 6)),
        assign(torch._neg_view), assign(lambda t: t.clone()),
        lambda t: t.set_(torch.zeros(9, device="cpu").untyped_storage()),
        lambda t: t.untyped_storage().resize_(400), lambda t: t.untyped_storage().resize_(0),
        lambda t: t.as_strided_((3, 3), (1, 5), 6), lambda t: t.unsqueeze_(0),
    ]  # fmt: skip
    kept = [lambda t: None, lambda t: t.fill_(1), lambda t: t.numpy().fill(2)]
    conjugated = seen(assign(torch.conj), torch.complex64)
    return all(map(seen, kept)) and not any(map(seen, changes)) and not conjugated
