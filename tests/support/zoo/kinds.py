"""Kinds of modules.

Each calls `meanwhile()` between two uses of its weights. There a test publishes another version, so that a call that
mixes versions shows.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import nn
from torch.nn.utils import parametrizations

WIDTH = 4


class Meanwhile:
    """What happens in the middle of the next call; nothing, unless a test sets it."""

    def __init__(self):
        self.action = None

    @torch.compiler.disable
    def __call__(self):
        action, self.action = self.action, None
        if action is not None:
            with torch.inference_mode(False):  # the trainer is another process
                action()


_meanwhile = Meanwhile()


def set_meanwhile(action):
    """Do this in the middle of the next call of a module of the zoo, once."""
    _meanwhile.action = action


def meanwhile():
    if not torch.compiler.is_compiling():
        _meanwhile()


class Pause(nn.Module):
    def forward(self, x):
        meanwhile()
        return x


def mlp(last=2):
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), Pause(), nn.Linear(8, last))


class Agent(nn.Module):
    """As in CleanRL: it has no forward."""

    def __init__(self):
        super().__init__()
        self.critic = mlp(1)
        self.actor = mlp(2)
        self.log_std = nn.Parameter(torch.zeros(2))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x):
        mean = self.actor(x)
        meanwhile()
        return mean, self.log_std.expand_as(mean), self.critic(x)


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

    def stream(self, x):
        cache = x
        for _ in range(3):
            logits, cache = self(torch.zeros(len(x), dtype=torch.long), cache)
            yield logits
            meanwhile()

    def lazily(self, x):
        hidden = self.body(x)
        return (self.lm_head(hidden) * factor for factor in (1, 2, 3))


class Normalised(nn.Module):
    """Replaces its buffer in each forward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, 2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        out = self.net(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return out


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


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 6, batch_first=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        hidden, _ = self.rnn(x[:, None])
        meanwhile()
        return self.out(hidden[:, 0])


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


class Holder:
    """An object of the user's own, which an output may be."""

    def __init__(self, **held):
        vars(self).update(held)


class Returning(nn.Module):
    """Returns its own weights, in whatever holds them."""

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
        return Holder(out=out, weights=[self.shift, deque([self.scale.expand_as(out)])], inner=Holder(noise=self.noise))


class Container(nn.ModuleDict):
    def __init__(self):
        super().__init__({"pi": mlp(), "v": mlp(1)})


def weight_norm():
    return nn.utils.weight_norm(nn.Linear(WIDTH, 2))


def parametrized():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 8)), Pause(), nn.Linear(8, 2))
