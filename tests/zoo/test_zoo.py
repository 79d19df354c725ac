"""Whatever way a bound module is used, it computes what the trainer's module would at the version that it shows.

Each test takes one way to use one kind of module (support/zoo.py) through every mode and number of slots. What else may
vary is drawn: the consistency, how the trainer publishes, and which tensors are replaced between two versions. The draw
has a seed; `make zoo ROUNDS=100` draws again and again.
"""

from __future__ import annotations

import functools
import os
import random
import threading
import warnings
import zlib

import pytest
import torch
from tensordict import TensorDict

import shmsync
from support.zoo import USES, WIDTH, set_meanwhile

ROUNDS = int(os.environ.get("ZOO_ROUNDS", "1"))
STEPS = 4

# ---- modes: (the worker's module, the use) -> what to call with x, once bound


def plain(bind, module, use):
    worker = bind(module)
    return lambda x: use.run(worker, x)


def named(bind, module, use):
    worker = bind(module, guard=use.names)
    return lambda x: use.run(worker, x)


def read_section(bind, module, use):
    worker = bind(module, guard=False)

    def run(x):
        with bind.subscriber.read():
            return use.run(worker, x)

    return run


def compiled_before(bind, module, use):
    worker = bind(torch.compile(module, backend="eager"))
    return lambda x: use.run(worker, x)


def used_then_compiled_before(bind, module, use):
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        use.run(compiled, torch.zeros(2, WIDTH))
    worker = bind(compiled)
    return lambda x: use.run(worker, x)


def compiled_after(bind, module, use):
    worker = torch.compile(bind(module), backend="eager")
    return lambda x: use.run(worker, x)


def compiled_whole_before(bind, module, use):
    worker = bind(torch.compile(module, backend="eager", fullgraph=use.whole))
    return lambda x: use.run(worker, x)


def compiled_whole_after(bind, module, use):
    worker = torch.compile(bind(module), backend="eager", fullgraph=use.whole)
    return lambda x: use.run(worker, x)


def compiled_in_place_before(bind, module, use):
    module.compile(backend="eager")
    worker = bind(module)
    return lambda x: use.run(worker, x)


def compiled_in_place_after(bind, module, use):
    worker = bind(module)
    worker.compile(backend="eager")
    return lambda x: use.run(worker, x)


def called_by_compiled_code(bind, module, use):
    worker = bind(module)
    return torch.compile(lambda x: use.run(worker, x), backend="eager")


def called_by_compiled_code_in_a_section(bind, module, use):
    worker = bind(module, guard=False)
    run = torch.compile(lambda x: use.run(worker, x), backend="eager", fullgraph=use.whole)

    def section(x):
        with bind.subscriber.read():
            return run(x)

    return section


def section_in_compiled_code(bind, module, use):
    worker = bind(module, guard=False)

    @torch.compile(backend="eager")
    def run(x):
        with bind.subscriber.read():
            return use.run(worker, x)

    return run


def autocast_loop(bind, module, use):
    worker = bind(module)

    def run(x):
        return use.run(worker, x)

    run.around = torch.autocast("cpu", dtype=torch.bfloat16)  # one for all calls
    run.expected_around = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
    return run


def inference_mode(bind, module, use):
    with torch.inference_mode():
        worker = bind(module)

    def run(x):
        with torch.inference_mode():
            return use.run(worker, x)

    return run


def another_thread(bind, module, use):
    worker = bind(module)

    def run(x):
        found = []
        thread = threading.Thread(target=lambda: found.append(use.run(worker, x)))
        thread.start()
        thread.join()
        return found[0]

    return run


def wrapped_after(bind, module, use):
    worker = bind(module)
    for name in [name for name in ("forward", *use.names) if "." not in name and name in vars(worker)]:
        inner = getattr(worker, name)
        setattr(worker, name, functools.wraps(inner)(lambda *args, inner=inner: inner(*args)))
    bind(worker)
    return lambda x: use.run(worker, x)


def bound_before_elsewhere(bind, module, use):
    bind.elsewhere(module)
    worker = bind(module)
    return lambda x: use.run(worker, x)


def two_arenas(bind, module, use):
    worker = bind.in_parts(module)
    return lambda x: use.run(worker, x)


MODES = [
    plain, named, read_section, compiled_before, used_then_compiled_before, compiled_after, compiled_whole_before,
    compiled_whole_after, compiled_in_place_before, compiled_in_place_after, called_by_compiled_code,
    called_by_compiled_code_in_a_section, section_in_compiled_code, autocast_loop, inference_mode, another_thread,
    wrapped_after, bound_before_elsewhere, two_arenas,
]  # fmt: skip
EXCLUSIVE = {  # one whole section around the call, so the same version must be shown before and after
    read_section, called_by_compiled_code_in_a_section, section_in_compiled_code,
}  # fmt: skip


class World:
    """A trainer, its arena, a worker's module, and what the trainer's module was at each version."""

    def __init__(self, use, mode, slots, rng):
        self.use, self.slots, self.rng = use, slots, rng
        self.parts = mode is two_arenas
        self.consistency = rng.choice(["pinned", "pinned", "optimistic"]) if use.repeats else "pinned"
        self.route = rng.choice(["module", "tensordict", "mapping", "update", *(["adopt"] if slots == 1 else [])])
        self.trainer = use.make()
        self.history = {}
        self.open = []
        self.module = use.make()
        keys = [name for name, _ in (*self.trainer.named_parameters(), *self.trainer.named_buffers())]
        self.publishers = [self._keep(shmsync.Publisher(self.trainer, slots=slots, include=part)) for part in (
            (keys[::2], list(keys[1::2])) if self.parts and len(keys) > 1 else (None,)
        )]  # fmt: skip
        if self.route == "adopt" and not self.parts:
            self.publishers[0].adopt(self.trainer)
        self.subscribers = [
            self._keep(shmsync.Subscriber(pub.handle, consistency=self.consistency)) for pub in self.publishers
        ]
        self.subscriber = self.subscribers[0]
        self._remember()

    def _keep(self, handle):
        self.open.append(handle)
        return handle

    def close(self):
        for handle in reversed(self.open):
            handle.close()

    def __call__(self, module, **options):
        return self.subscriber.bind(module, **options)

    def elsewhere(self, module):
        with shmsync.Publisher(self.use.make(), slots=self.slots) as pub, shmsync.Subscriber(pub.handle) as sub:
            sub.bind(module)

    def in_parts(self, module):
        for subscriber in self.subscribers:
            subscriber.bind(module)
        return module

    def _remember(self):
        twin = self.use.make()
        live = {**dict(self.trainer.named_parameters()), **dict(self.trainer.named_buffers())}
        with torch.no_grad():
            for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
                tensor.copy_(live[name])
        self.history[self.publishers[0].version] = twin

    def advance(self):
        """Train a little, and publish."""
        rng = self.rng
        pub = self.publishers[0]
        if self.route in ("update", "adopt") and not self.parts:
            with pub.update() as weights:
                self._train(weights if self.route == "update" else None)
        else:
            self._train(None)
            if rng.random() < 0.3:
                self._replace(self.trainer)
            for each in self.publishers:
                each.publish(self._source(each))
        self._remember()

    def _source(self, pub):
        if self.parts or self.route == "module":
            return None
        if self.route == "tensordict":
            return TensorDict.from_module(self.trainer)
        named = {**dict(self.trainer.named_parameters()), **dict(self.trainer.named_buffers())}
        leaves = {leaf.name for leaf in pub.manifest.leaves}
        return {name: tensor.detach() for name, tensor in named.items() if name in leaves}

    def _train(self, weights):
        with torch.no_grad():
            for name, tensor in (*self.trainer.named_parameters(), *self.trainer.named_buffers()):
                if tensor.is_floating_point() and not name.endswith("_mask"):
                    tensor.add_(torch.randn_like(tensor) * 0.1)
                    if name.endswith(("running_var", "sigma")):
                        tensor.abs_()
                elif tensor.dtype == torch.long:
                    tensor.add_(1)
                if weights is not None:
                    weights.get(tuple(name.split("."))).copy_(tensor)

    def _replace(self, module):
        """Put another tensor, of the same value, in the place of one of the module's."""
        owners = [child for child in module.modules() if child._parameters or child._buffers]
        owner = self.rng.choice(owners)
        name = self.rng.choice([*owner._parameters, *owner._buffers])
        tensor = getattr(owner, name)
        if tensor is None or sum(tensor is other for other in _tensors(module)) > 1:
            return  # a tied one: replacing it unties it
        if name in owner._parameters:
            setattr(owner, name, torch.nn.Parameter(tensor.detach().clone()))
        else:
            setattr(owner, name, tensor.clone())

    def check(self, run, steps):
        for number in range(steps):
            if number and self.rng.random() < 0.8:
                self.advance()
            if number and self.rng.random() < 0.3 and not isinstance(self.module, torch.jit.ScriptModule):
                self._replace(self.module)
                self.advance()
            x = torch.randn(3, WIDTH)
            latest = self.publishers[0].version
            if self.slots > 1 and not self.parts:
                set_meanwhile(self.advance)
            try:
                with getattr(run, "around", _nothing):
                    out = run(x)
            finally:
                set_meanwhile(None)
            version = self.subscriber.version
            assert version >= latest, f"version {version} is shown, {latest} was published"
            with getattr(run, "expected_around", lambda: _nothing)():
                expected = self.use.run(self.history[version], x)
            assert same(out, expected), f"not what the trainer's module computed at version {version}"


def _tensors(module):
    for child in module.modules():
        yield from (*child._parameters.values(), *child._buffers.values())


class _Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


_nothing = _Nothing()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-6) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b))


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore:a bound module ran with gradients on")
def test_a_bound_module_computes_what_the_trainers_does(use):
    for number in range(ROUNDS):
        for mode in MODES:
            for slots in (1, 2, 3):
                seed = zlib.crc32(f"{use} {mode.__name__} {slots} {number}".encode())
                _visit(USES[use], mode, slots, seed)


def _visit(use, mode, slots, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch._dynamo.reset()
    world = World(use, mode, slots, rng)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = mode(world, world.module, use)
            with getattr(run, "around", _nothing):
                run.around = _nothing
                world.check(run, STEPS)
    except BaseException as error:
        drawn = f"{mode.__name__}, slots={slots}, {world.consistency}, published by {world.route}, seed {seed}"
        error.args = (f"{drawn}: {error}",)
        raise
    finally:
        world.close()
