"""A trainer's module that replaces its tensors, in every way there is, and the ways in which a publisher holds it."""

from __future__ import annotations

import math

import torch
from torch import nn

from shmsync.schemes.arenas import ALL, ArenaOptions, Arenas
from shmsync.schemes.devices import WorkerDevices


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("later", None)


def assign_buffer(module):
    module.mean = 0.9 * module.mean + 1


def convert(module):
    module.double().float()


def load_assign(module):
    module.load_state_dict({key: t.clone() + 1 for key, t in module.state_dict().items()}, assign=True)


def swap(module):
    torch.utils.swap_tensors(module.lin.weight, nn.Parameter(torch.full((3, 3), 5.0)))


def convert_by_swapping(module):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def new_parameter(module):
    module.lin.weight = nn.Parameter(torch.full((3, 3), 6.0))


def new_submodule(module):
    module.lin = nn.Linear(3, 3)


def register_again(module):
    del module.mean
    module.register_buffer("mean", torch.full((3,), 7.0), persistent=False)


def store_buffer(module):
    module._buffers["mean"] = torch.full((3,), 8.0)


def swap_dicts(module):
    other = Policy()
    module.__dict__["_buffers"] = other.__dict__["_buffers"]
    module.lin.__dict__["_parameters"] = other.lin.__dict__["_parameters"]


def take_over_state(module):
    module.norm.__dict__.update(nn.BatchNorm1d(3).__dict__)
    module.norm.running_var.fill_(3)


def set_data(module):
    module.lin.weight.data = torch.full((3, 3), 9.0).t()
    module.mean.data = torch.full((3,), 9.0)


def reorder(module):
    module.lin.weight.data = module.lin.weight.data.t()  # the same place, in another order


def exchange(module):
    first, second = module.lin.weight, nn.Parameter(module.lin.weight.detach() + 3)
    module.lin.weight, module.other = second, first
    del module.other


WAYS = [
    assign_buffer, convert, load_assign, swap, convert_by_swapping, new_parameter, new_submodule, register_again,
    store_buffer, swap_dicts, take_over_state, set_data, reorder, exchange,
]  # fmt: skip


def shown(sub):
    return {".".join(key) if isinstance(key, tuple) else key: t for key, t in sub.snapshot().weights.items(True, True)}


def assert_current(sub, module):
    seen = shown(sub)
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert torch.equal(seen[key], tensor), key


def add_in_place(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)


def update(pub):
    """What the adopted module has now is the next version."""
    with pub.update():
        pass


class Held:
    """A trainer's module, held by a publisher in one way; send() makes what it has now the next version."""

    def __init__(self, publisher, module, how, slots=1):
        self.module, self.how = module, how
        if how == "scheme":
            self.publishers = Arenas(ArenaOptions(slots, 5.0, None, False, None), WorkerDevices(None))
            self._send()
            self.pub = self.publishers.made["policy"][ALL]
            return
        self.publishers = None
        self.pub = publisher(module, slots=slots)
        if how.startswith("adopted"):
            self.pub.adopt(module)

    def send(self):
        if self.how == "adopted, update":
            update(self.pub)
        elif self.how == "adopted, step":  # by an optimizer that adopt() does not know
            with self.pub.update():
                torch.optim.SGD(self.module.parameters(), lr=1.0).step()
        elif self.publishers is not None:
            self._send()
        else:
            self.pub.publish(self.module if "itself" in self.how else None)

    def _send(self):
        self.publishers.publish("policy", self.module, [ALL], self.publishers.version("policy") + 1, 1, math.inf)

    def close(self):
        if self.publishers is not None:
            self.publishers.close()
