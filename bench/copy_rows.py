"""publish() of large and of many weights, against a flat copy of the same bytes."""

from __future__ import annotations

import ctypes

import torch
from measure import side_by_side, timed
from torch import nn

import shmsync


def layers(count: int, total_bytes: int) -> nn.Module:
    """`count` parameters of equal size."""
    each = total_bytes // 4 // count
    return nn.ParameterList([nn.Parameter(torch.rand(each), requires_grad=False) for _ in range(count)])


def copy_rows() -> None:
    for count, megabytes, rounds in ((14, 100, 15), (300, 100, 15), (14, 1000, 5)):
        module = layers(count, megabytes << 20)
        with shmsync.Publisher(module) as pub:
            flat = torch.cat([p.data for p in module])
            target = pub._arena.weights(0, writable=True).get("0").untyped_storage()
            slab = torch.empty(0).set_(target, 0, (flat.numel(),), (1,))
            results = {}
            for name, floor in (
                ("torch.copy_", lambda slab=slab, flat=flat: slab.copy_(flat)),
                ("memcpy", lambda slab=slab, flat=flat: ctypes.memmove(slab.data_ptr(), flat.data_ptr(), flat.nbytes)),
            ):
                results[name] = min(timed(floor) for _ in range(4)), floor
            name, (_, floor) = min(results.items(), key=lambda item: item[1][0])
            side_by_side(f"publish {megabytes} MB in {count} tensors / {name}", pub.publish, floor, rounds, "1.0 x")
            pub.publish()
            assert all(torch.equal(pub.weights[str(i)], p) for i, p in enumerate(module)), "checksum"
    module = layers(200, 1_600_000)
    with shmsync.Publisher(module) as pub:
        flat, slab = torch.cat([p.data for p in module]), torch.empty(400_000)
        ctypes_copy = lambda: ctypes.memmove(slab.data_ptr(), flat.data_ptr(), flat.nbytes)  # noqa: E731
        side_by_side("publish 1.6 MB in 200 tensors / memcpy", pub.publish, ctypes_copy, 300, "+ 15 us")
        module[7].data.fill_(3)
        pub.publish()
        assert torch.equal(pub.weights["7"], module[7]), "checksum"
