"""Kinds of modules.

Each calls `meanwhile()` between two uses of its weights. There a test publishes another version, so that a call that
mixes versions shows.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

WIDTH = 4


next_action = []  # what happens in the middle of the next call of a module of the zoo, once


def meanwhile():
    if not torch.compiler.is_compiling() and next_action:
        with torch.inference_mode(False):  # the trainer is another process
            next_action.pop()()


class Pause(nn.Module):
    def forward(self, x):
        meanwhile()
        return x


def mlp(last=2):
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), Pause(), nn.Linear(8, last))


class Policy(nn.Module):
    """As in SB3: features, then heads; methods that call one another."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.predict(x)

    def predict(self, x):
        hidden = self.encoder.encode(x)
        meanwhile()
        return self.head(hidden)

    @torch.no_grad()
    def evaluate_actions(self, x):
        return {"value": self(x), "weights": [self.head.weight]}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.encode(x)

    def encode(self, x):
        return torch.tanh(self.net(x))


class Decoder(nn.Module):
    """As Hugging Face's generate() does: a loop over forward, with a cache of what earlier steps made."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, 5, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens, cache):
        cache = cache + self.body(self.embed(tokens))
        return self.lm_head(cache), cache

    def generate(self, x, steps=3):
        cache = x
        tokens = torch.zeros(len(x), dtype=torch.long)
        found = []
        for _ in range(steps):
            logits, cache = self(tokens, cache)
            found.append(logits)
            meanwhile()
        return torch.stack(found)


class Hooked(nn.Linear):
    """A pre-hook that reads a weight, and a hook that does."""

    def __init__(self):
        super().__init__(WIDTH, 2)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_forward_pre_hook(scaled)
        self.register_forward_hook(shifted)


def scaled(module, args):
    out = args[0] * module.scale
    meanwhile()
    return (out,)


def shifted(module, args, out):
    meanwhile()
    return out + module.bias


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, 2)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        hidden = self.norm(x)
        meanwhile()
        return self.out(hidden) + self.step


class Returning(nn.Module):
    """Returns its own weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, 2)
        self.shift = nn.Parameter(torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("noise", torch.zeros(2))

    def dist(self, x):
        """As in SAC: the transforms hold weights."""
        base = torch.distributions.Normal(self.net(x), 1.0, validate_args=False)
        meanwhile()
        affine = torch.distributions.AffineTransform(self.shift, self.scale)
        return torch.distributions.TransformedDistribution(
            base, [torch.distributions.ComposeTransform([affine])], validate_args=False
        )

    def held(self, x):
        out = self.net(x)
        meanwhile()
        return {"out": out, "weights": [self.shift, (self.scale.expand_as(out),)], "noise": self.noise}


def parametrized():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 8)), Pause(), nn.Linear(8, 2))
