"""Policies of the TorchRL tests; the collectors' workers import them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from support.processes import until
from support.weights import fill


class Readable:
    """What a test asks a worker's policy."""

    def read(self):
        found = self.state_dict().items()
        return {key: value.detach().clone() for key, value in found if isinstance(value, torch.Tensor)}

    def call(self, function, *args):
        """Run it in this worker, on this policy."""
        return function(self, *args)


class Tagged(Readable, TensorDictModuleBase):
    """All its weights are the number of the update, and it says in each frame which it saw, at the start of its forward
    and a moment later."""

    def __init__(self, tag=0.0, *, layers=2, size=4, pause=0.0):
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "tag", "first", "last"]
        self.layers = nn.ParameterList([torch.full((size,), float(tag)) for _ in range(layers)])
        self.register_buffer("tag", torch.tensor([float(tag)]))
        self.pause, self.folder, self.gate = pause, None, ""

    def forward(self, tensordict):
        first = self.layers[0].detach().min()
        if self.folder is not None:
            Path(self.folder, str(os.getpid())).touch()
        if self.gate != "":
            until(Path(self.gate).exists)
        time.sleep(self.pause)
        last = torch.stack([layer.detach().max() for layer in self.layers]).max()
        ones = torch.ones_like(tensordict["observation"])
        return tensordict.update({"action": ones, "tag": self.tag * ones, "first": first * ones, "last": last * ones})

    def set(self, tag):
        fill(self, tag)


def seen(frames):
    """The tag of every frame: each of its parts must be of the same weights."""
    for key in ("first", "last"):
        assert torch.equal(frames[key], frames["tag"]), key
    return frames["tag"].squeeze(-1).long()


class Acting(Readable, TensorDictModule):
    """A policy of one net, from the observation to the action."""

    def __init__(self, net):
        super().__init__(net, in_keys=["observation"], out_keys=["action"])


class Remembering(nn.Module):
    """Keeps notes beside its weight; bad ones make it fail."""

    def __init__(self, notes=()):
        super().__init__()
        self.notes = list(notes)
        self.weight = nn.Parameter(torch.full((1,), float(len(self.notes))))

    def get_extra_state(self):
        return {"notes": list(self.notes)}

    def set_extra_state(self, state):
        if "bad" in state["notes"]:
            raise RuntimeError("a bad note")
        self.notes = list(state["notes"])

    def forward(self, observation):
        return self.weight.detach() * torch.ones_like(observation)

    def write(self, *notes):
        """The weight is the number of notes."""
        self.notes += notes
        with torch.no_grad():
            self.weight.fill_(len(self.notes))


def notes(policy):
    """What the modules of a policy remember, by their weights: (weight, notes) each."""
    found = [module for module in policy.modules() if isinstance(module, Remembering)]
    return [(int(module.weight), module.notes) for module in found]


def receiving_threads():
    """How many threads of TorchRL's receive weights in this process."""
    return sum(thread.name.startswith("WeightReceiver") for thread in threading.enumerate())
