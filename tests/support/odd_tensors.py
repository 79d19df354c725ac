"""Tensors that cannot be copied by address, each newly made; all have the shape (4,), and float32 where they can.

`ODD[kind]` is (how to make one, a word of the message that refuses it).
"""

from __future__ import annotations

import torch
from torch import nn


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


def _distributed(parameter=False):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    made = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()])
    return nn.Parameter(made) if parameter else made


def _fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4)


def _transformed(transform):
    kept = []

    def look(x):
        kept.append(x)
        return x.sum()

    transform(look)
    return kept[0]


def _masked():
    return torch.masked.masked_tensor(torch.ones(4), torch.tensor([True, False, True, True]))


def _nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=layout)


def _given_back():
    made = torch.ones(4)
    made.untyped_storage().resize_(0)
    return made


def _shrunk():
    made = torch.ones(4)
    made.untyped_storage().resize_(8)
    return made


def _exotic_parameter(make):
    """A plain parameter by its type, with something else inside."""
    parameter = nn.Parameter(torch.ones(4))
    parameter.data = make()
    return parameter


ODD = {
    "DTensor": (_distributed, "full_tensor"),
    "DTensor parameter": (lambda: _distributed(parameter=True), "full_tensor"),
    "fake": (_fake, "FakeTensor"),
    "fake parameter": (lambda: nn.Parameter(_fake()), "FakeTensor"),
    "of grad": (lambda: _transformed(lambda f: torch.func.grad(f)(torch.ones(4))), "transform"),
    "of vmap": (lambda: _transformed(lambda f: torch.vmap(f)(torch.ones(2, 4))), "transform"),
    "of functionalize": (lambda: _transformed(lambda f: torch.func.functionalize(f)(torch.ones(4))), "transform"),
    "masked": (_masked, "MaskedTensor"),
    "nested": (lambda: _nested(torch.strided), "nested tensor"),
    "jagged": (lambda: _nested(torch.jagged), "nested tensor"),
    "zero": (lambda: torch._efficientzerotensor((4,)), "zero tensor"),
    "wrapper": (lambda: Wrapper(torch.ones(4)), "Wrapper"),
    "wrapper inside a parameter": (lambda: _exotic_parameter(lambda: Wrapper(torch.ones(4))), "its own memory"),
    "DTensor inside a parameter": (lambda: _exotic_parameter(_distributed), "its own memory"),
    "given back": (_given_back, "storage of 0 bytes"),
    "shrunk": (_shrunk, "storage of 8 bytes but needs 16"),
    "sparse": (lambda: torch.ones(4).to_sparse(), "to_dense"),
    "compressed sparse": (lambda: torch.ones(2, 2).to_sparse_csr(), "to_dense"),
    "mkldnn": (lambda: torch.ones(4).to_mkldnn(), "to_dense"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "quantised"),
    "meta": (lambda: torch.ones(4, device="meta"), "meta"),
}

# What may become of a tensor between two looks at it, and the shapes of those that tests try it with.
SHAPES = {"a": (4, 3), "b": (12,), "c": (2, 2, 2), "one": (1,), "w": (40, 40)}
CHANGES = {
    "in place": lambda t: t.data.add_(1),
    "data": lambda t: setattr(t, "data", torch.rand(t.shape)),
    "data, a view": lambda t: setattr(t, "data", torch.rand(3, *t.shape)[1]),
    "data, in another order": lambda t: setattr(t, "data", torch.rand(t.shape[::-1]).permute(*range(t.dim())[::-1])),
    "data, negated": lambda t: setattr(t, "data", torch._neg_view(t.data)),
    "data, another shape": lambda t: setattr(t, "data", torch.rand(2, *t.shape)),
    "data, another dtype": lambda t: setattr(t, "data", torch.rand(t.shape, dtype=torch.float64)),
    "set_": lambda t: t.data.set_(torch.rand(t.shape)),
    "resize_": lambda t: t.data.resize_(t.numel() + 2),
    "storage moves": lambda t: t.untyped_storage().resize_(t.untyped_storage().nbytes() + 4096),
    "storage given back": lambda t: t.untyped_storage().resize_(0),
    "requires_grad_": lambda t: t.requires_grad_(not t.requires_grad),
    "swapped": lambda t: torch.utils.swap_tensors(t, type(t)(torch.rand(t.shape))),
}

# How a plain parameter becomes an odd one, and which of them torch itself refuses then.
BECOME = {
    "data": lambda parameter, odd: setattr(parameter, "data", odd),
    "swap": torch.utils.swap_tensors,
}
CANNOT_BECOME = {
    "data": ["of vmap", "nested", "sparse", "compressed sparse", "mkldnn", "quantised", "meta"],
    "swap": ["DTensor", "DTensor parameter"],
}
