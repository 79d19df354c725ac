"""Tensors that cannot be copied by address, each newly made; all have the shape (4,), and float32 where they can.

`ODD[kind]` is (how to make one, a word of the message that refuses it).
"""

from __future__ import annotations

import torch


class Wrapper(torch.Tensor):
    """As quantisation libraries make them: the values lie in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"{func} of a Wrapper")


def _distributed():
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()])


def _fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4)


def _resized(nbytes):
    made = torch.ones(4)
    made.untyped_storage().resize_(nbytes)
    return made


ODD = {
    "DTensor": (_distributed, "full_tensor"),
    "fake": (_fake, "FakeTensor"),
    "wrapper": (lambda: Wrapper(torch.ones(4)), "Wrapper"),
    "given back": (lambda: _resized(0), "storage of 0 bytes"),
    "shrunk": (lambda: _resized(8), "storage of 8 bytes but needs 16"),
    "sparse": (lambda: torch.ones(4).to_sparse(), "to_dense"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "quantised"),
    "meta": (lambda: torch.ones(4, device="meta"), "meta"),
}
