"""One world of the zoo: a trainer, its arena, a worker's module, and the oracle."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext

import torch

import shmsync
from support.zoo.kinds import WIDTH, next_action
from support.zoo.modes import UNGUARDED

STEPS = 4


class World:
    """A trainer, its arena, a worker's module, and what the trainer's module was at each version."""

    def __init__(self, use, mode, slots, rng):
        self.use, self.slots, self.rng = use, slots, rng
        self.keeps = mode not in UNGUARDED
        self.consistency = rng.choice(["pinned", "optimistic"]) if use.repeats else "pinned"
        self.route = rng.choice(["publish", "update", *(["adopt", "load"] if slots == 1 else [])])
        self.trainer, self.module = use.make(), use.make()
        self.publisher = shmsync.Publisher(self.trainer, slots=slots)
        if self.route in ("adopt", "load"):
            self.publisher.adopt(self.trainer)
        self.subscriber = shmsync.Subscriber(self.publisher.handle, consistency=self.consistency)
        self.history = {1: self._twin()}

    def close(self):
        self.subscriber.close()
        self.publisher.close()

    def __call__(self, module, **options):
        return self.subscriber.bind(module, **options)

    def _twin(self):
        """A separate module with the values that the trainer's has now."""
        twin = self.use.make()
        twin.load_state_dict(self.trainer.state_dict())
        return twin

    def advance(self):
        """Train a little, and publish."""
        if self.route == "load":
            other = self._twin()
            train(other)
            self.trainer.load_state_dict(other.state_dict())
        elif self.route == "publish":
            train(self.trainer)
            self.publisher.publish()
        else:
            with self.publisher.update() as weights:
                train(self.trainer, weights if self.route == "update" else None)
        self.history[self.publisher.version] = self._twin()

    def check(self, run):
        kept = []
        for number in range(STEPS):
            if number and self.rng.random() < 0.8:
                self.advance()
            x = torch.randn(3, WIDTH)
            latest = self.publisher.version
            next_action[:] = [self.advance] if self.slots > 1 else []
            out = run(x)
            next_action.clear()  # compiled code does not come there
            version = self.subscriber.version
            assert version >= latest, f"version {version} is shown, {latest} was published"
            with getattr(run, "expected_around", nullcontext)():
                expected = self.use.run(self.history[version], x)
            assert same(out, expected), f"not what the trainer computed at version {version}"
            kept.append((version, out, expected))
        for _ in range(self.slots if self.keeps else 0):
            self.advance()
        self.subscriber.refresh()
        for version, out, expected in kept if self.keeps else ():
            assert same(out, expected), f"a result of version {version} has changed with later versions"


@torch.no_grad()
def train(module, weights=None):
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.add_(torch.randn_like(tensor) * 0.1)
            if name.endswith("running_var"):
                tensor.abs_()
        else:
            tensor.add_(1)
        if weights is not None:
            weights.get(tuple(name.split("."))).copy_(tensor)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-6) and a.dtype == b.dtype
    if isinstance(a, torch.distributions.Distribution):
        at = torch.full(b.batch_shape + b.event_shape, 0.5)
        return same(a.log_prob(at), b.log_prob(at))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))


def visit(use, mode, slots, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch._dynamo.reset()
    world = World(use, mode, slots, rng)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = mode(world, world.module, use)
            with getattr(run, "around", nullcontext()):
                world.check(run)
    except BaseException as error:
        drawn = f"{mode.__name__}, slots={slots}, {world.consistency}, published by {world.route}, seed {seed}"
        error.args = (f"{drawn}: {error}",)
        raise
    finally:
        world.close()
