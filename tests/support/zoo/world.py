"""One world of the zoo: a trainer, its arena, a worker's module, and the oracle."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext

import torch
from tensordict import TensorDict

import shmsync
from support.zoo.kinds import WIDTH, set_meanwhile
from support.zoo.modes import CREATIONS, UNGUARDED

STEPS = 4


class World:
    """A trainer, its arena, a worker's module, and what the trainer's module was at each version."""

    def __init__(self, use, mode, slots, rng):
        self.use, self.slots, self.rng = use, slots, rng
        self.keeps = mode not in UNGUARDED
        self.consistency = rng.choice(["pinned", "pinned", "optimistic"]) if use.repeats else "pinned"
        adopted = ["adopt", "load"] if slots == 1 else []  # load: by load_state_dict()
        self.route = rng.choice(["module", "tensordict", "mapping", "update", *adopted])
        self.trainer = use.make()
        self.history = {}
        self.creation = rng.choice(list(CREATIONS))
        with CREATIONS[self.creation]():
            self.module = use.make()
        self.publisher = shmsync.Publisher(self.trainer, slots=slots)
        if self.route in ("adopt", "load"):
            self.publisher.adopt(self.trainer)
        self.subscriber = shmsync.Subscriber(self.publisher.handle, consistency=self.consistency)
        self._remember()

    def close(self):
        self.subscriber.close()
        self.publisher.close()

    def __call__(self, module, **options):
        return self.subscriber.bind(module, **options)

    def _twin(self):
        """A separate module with the values that the trainer's has now."""
        twin = self.use.make()
        live = {**dict(self.trainer.named_parameters()), **dict(self.trainer.named_buffers())}
        with torch.no_grad():
            for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
                tensor.copy_(live[name])
        return twin

    def _remember(self):
        self.history[self.publisher.version] = self._twin()

    def advance(self):
        """Train a little, and publish."""
        rng = self.rng
        pub = self.publisher
        if self.route == "load":
            other = self._twin()
            self._train(other)
            self.trainer.load_state_dict(other.state_dict())
        elif self.route in ("update", "adopt"):
            with pub.update() as weights:
                self._train(self.trainer, weights if self.route == "update" else None)
        else:
            self._train(self.trainer)
            if rng.random() < 0.3:
                self._replace(self.trainer)
            pub.publish(self._source())
        self._remember()

    def _source(self):
        if self.route == "module":
            return None
        if self.route == "tensordict":
            return TensorDict.from_module(self.trainer)
        named = {**dict(self.trainer.named_parameters()), **dict(self.trainer.named_buffers())}
        return {name: tensor.detach() for name, tensor in named.items()}

    def _train(self, module, weights=None):
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor) * 0.1)
                    if name.endswith("running_var"):
                        tensor.abs_()
                elif tensor.dtype == torch.long:
                    tensor.add_(1)
                if weights is not None:
                    weights.get(tuple(name.split("."))).copy_(tensor)

    def _replace(self, module):
        """Put another tensor, of the same value, in the place of one of the module's; of a worker's, of a buffer."""
        owners = [
            (owner, name)
            for owner in module.modules()
            for name in (*(owner._parameters if module is self.trainer else ()), *owner._buffers)
        ]
        if not owners:
            return
        owner, name = self.rng.choice(owners)
        tensor = getattr(owner, name)
        if tensor is None or sum(tensor is other for other in _tensors(module)) > 1:
            return  # a tied one: replacing it unties it
        if name in owner._parameters:
            setattr(owner, name, torch.nn.Parameter(tensor.detach().clone()))
        else:
            setattr(owner, name, tensor.clone())

    def check(self, run, steps):
        kept = []
        for number in range(steps):
            if number and self.rng.random() < 0.8:
                self.advance()
            if number and self.rng.random() < 0.3:
                self._replace(self.module)
                self.advance()
            x = torch.randn(3, WIDTH)
            latest = self.publisher.version
            if self.slots > 1:
                set_meanwhile(self.advance)
            try:
                out = run(x)
            finally:
                set_meanwhile(None)
            labelled = out if hasattr(run, "labelled") else [(out, self.subscriber.version)]
            for out, version in labelled:
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


def _tensors(module):
    for child in module.modules():
        yield from (*child._parameters.values(), *child._buffers.values())


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
                world.check(run, STEPS)
    except BaseException as error:
        drawn = (
            f"{mode.__name__}, slots={slots}, {world.consistency}, made in {world.creation}, published by "
            f"{world.route}, seed {seed}"
        )
        error.args = (f"{drawn}: {error}",)
        raise
    finally:
        world.close()
