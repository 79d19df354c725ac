"""The zoo: kinds of modules, and ways in which people use them.

Each kind calls `meanwhile()` between two uses of its weights. There a test publishes another version, so that a call
that mixes versions shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn.utils import parametrizations, prune

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


# ---- kinds


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

    def get_dist(self, x):
        return torch.distributions.Normal(self.actor(x), self.log_std.exp())


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


class Container(nn.ModuleDict):
    def __init__(self):
        super().__init__({"pi": mlp(), "v": mlp(1)})


def weight_norm():
    return nn.utils.weight_norm(nn.Linear(WIDTH, 2))


def spectral_norm():
    return nn.utils.spectral_norm(nn.Linear(WIDTH, 3)).eval()


def pruned():
    module = nn.Linear(WIDTH, 2)
    prune.random_unstructured(module, "weight", amount=2)
    return module


def parametrized():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 8)), Pause(), nn.Linear(8, 2))


def tensordict_module():
    first = TensorDictModule(nn.Linear(WIDTH, 8), in_keys=["x"], out_keys=["h"])
    return TensorDictSequential(first, TensorDictModule(nn.Sequential(Pause(), nn.Linear(8, 2)), ["h"], ["y"]))


# ---- ways of use


class Use(NamedTuple):
    """One way to use one kind. `names`: what to guard when the user lists it. `whole`: Dynamo compiles it as one graph.

    `repeats`: calling it again with the same weights gives the same.
    """

    make: Callable[[], nn.Module]
    run: Callable[[Any, torch.Tensor], Any]
    names: list[str]
    whole: bool = True
    repeats: bool = True


def _call(module, x):
    return module(x)


def _forward(module, x):
    return module.forward(x)


def _through_tensordict(module, x):
    return module(TensorDict({"x": x}, batch_size=[len(x)]))["y"]


def _distribution(module, x):
    found = module.get_dist(x)
    return found.loc, found.scale


USES = {
    "mlp": Use(mlp, _call, ["forward"]),
    "mlp.forward": Use(mlp, _forward, ["forward"]),
    "agent.get_value": Use(Agent, lambda m, x: m.get_value(x), ["get_value"]),
    "agent.get_action_and_value": Use(Agent, lambda m, x: m.get_action_and_value(x), ["get_action_and_value"]),
    "agent.get_dist": Use(Agent, _distribution, ["get_dist"], whole=False),
    "agent.critic": Use(Agent, lambda m, x: m.critic(x), ["critic"]),
    "policy": Use(Policy, _call, ["forward"]),
    "policy.predict": Use(Policy, lambda m, x: m.predict(x), ["predict"]),
    "policy.evaluate_actions": Use(Policy, lambda m, x: m.evaluate_actions(x), ["evaluate_actions"]),
    "policy.encoder": Use(Policy, lambda m, x: m.encoder(x), ["encoder"]),
    "policy.encoder.forward": Use(Policy, lambda m, x: m.encoder.forward(x), ["encoder.forward"]),
    "policy.encoder.encode": Use(Policy, lambda m, x: m.encoder.encode(x), ["encoder.encode"]),
    "policy.head": Use(Policy, lambda m, x: m.head(x.repeat(1, 2)), ["head"]),
    "decoder.generate": Use(Decoder, lambda m, x: m.generate(x), ["generate"]),
    "decoder.stream": Use(Decoder, lambda m, x: list(m.stream(x)), ["stream"], whole=False),
    "decoder.lazily": Use(Decoder, lambda m, x: list(m.lazily(x)), ["lazily"], whole=False),
    "normalised": Use(Normalised, _call, ["forward"], repeats=False),
    "hooked": Use(Hooked, _call, ["forward"]),
    "recurrent": Use(Recurrent, _call, ["forward"], whole=False),
    "batched": Use(Batched, _call, ["forward"], repeats=False),
    "container.pi": Use(Container, lambda m, x: m.pi(x), ["pi"]),
    "weight_norm": Use(weight_norm, _call, ["forward"], whole=False),
    "spectral_norm": Use(spectral_norm, _call, ["forward"], whole=False),
    "pruned": Use(pruned, _call, ["forward"], whole=False),
    "parametrized": Use(parametrized, _call, ["forward"], whole=False),
    "tensordict_module": Use(tensordict_module, _through_tensordict, ["forward"], whole=False),
}
