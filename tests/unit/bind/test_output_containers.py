"""Whatever holds them, views of the weights that leave a section do not change with later versions."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import types

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import distributions, nn

import shmsync

SIZE = 4


class Plain:
    def __init__(self, held):
        self.held = held


class Slotted:
    __slots__ = ("empty", "held")

    def __init__(self, held):
        self.held = held


class Both(Slotted):
    def __init__(self, held):
        super().__init__(held)
        self.again = held


@dataclasses.dataclass(frozen=True)
class Data:
    held: object


Pair = collections.namedtuple("Pair", ["held", "number"])


class Strange(dict):
    """Whose methods must not be called."""

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was asked for")

    __iter__ = __len__ = __eq__ = lambda self, *_: 1 / 0
    __hash__ = None


class Method:
    def __init__(self, held):
        self.held = held

    def show(self):
        return self.held


@tensorclass
class Tensors:
    held: torch.Tensor


def cyclic(held):
    made = [held]
    made.append(Plain(made))
    return made


def sac(held):
    transforms = [distributions.AffineTransform(held, 1.0), distributions.TanhTransform(cache_size=1)]
    return distributions.TransformedDistribution(
        distributions.Normal(torch.zeros(SIZE), 1.0), [distributions.ComposeTransform(transforms)]
    )


def mixture(held):
    normal = distributions.Independent(distributions.Normal(held[None].expand(3, SIZE), 1.0), 1)
    return distributions.MixtureSameFamily(distributions.Categorical(torch.ones(3)), normal)


def inverse(held):
    affine = distributions.AffineTransform(held, 1.0)
    return (affine, affine.inv)


def model_output(held):
    reason = "these outputs need transformers, which shmsync[guides] brings"
    outputs = pytest.importorskip("transformers.modeling_outputs", reason=reason)
    return outputs.BaseModelOutput(last_hidden_state=held, hidden_states=(held,))


def closure(held):
    return lambda: held


def made_by(container):
    return container.default_factory.args[0]


# How to hold something, and how to see what is held.
CONTAINERS = {
    "itself": (lambda h: h, lambda c: c),
    "tuple": (lambda h: (1, h), lambda c: c[1]),
    "named tuple": (lambda h: Pair(h, 1), lambda c: c.held),
    "list": (lambda h: [[h]], lambda c: c[0][0]),
    "dict": (lambda h: {"a": {"b": h}}, lambda c: c["a"]["b"]),
    "ordered dict": (lambda h: collections.OrderedDict(b=1, a=h), lambda c: c["a"]),
    "default dict": (lambda h: collections.defaultdict(list, a=h), lambda c: c["a"]),
    "default factory": (lambda h: collections.defaultdict(functools.partial(max, h)), made_by),
    "strange dict": (lambda h: Strange(a=h), lambda c: dict.__getitem__(c, "a")),
    "user dict": (lambda h: collections.UserDict(a=h), lambda c: c["a"]),
    "mapping proxy": (lambda h: types.MappingProxyType({"a": h}), lambda c: c["a"]),
    "deque": (lambda h: collections.deque([h], maxlen=3), lambda c: c[0]),
    "set": (lambda h: {Plain(h)}, lambda c: next(iter(c)).held),
    "frozen set": (lambda h: frozenset({Plain(h)}), lambda c: next(iter(c)).held),
    "object": (Plain, lambda c: c.held),
    "slots": (Slotted, lambda c: c.held),
    "slots and dict": (Both, lambda c: c.again),
    "dataclass": (Data, lambda c: c.held),
    "namespace": (lambda h: types.SimpleNamespace(a=h), lambda c: c.a),
    "partial": (lambda h: functools.partial(max, [h], key=h), lambda c: c.keywords["key"]),
    "bound method": (lambda h: Method(h).show, lambda c: c()),
    "closure": (closure, lambda c: c()),
    "default": (lambda h: lambda x=h: x, lambda c: c()),
    "iterator": (lambda h: iter([h]), lambda c: next(copy.copy(c))),
    "map": (lambda h: map(id, [h]), lambda c: gc.get_referents(c)),
    "generator in a tuple": (lambda h: ((h for _ in [h]),), lambda c: c),
    "values": (lambda h: {"a": h}.values(), lambda c: next(iter(c))),
    "object array": (lambda h: boxed(h), lambda c: c[0]),
    "cyclic": (cyclic, lambda c: c[1].held[0]),
    "deep": (lambda h: functools.reduce(lambda held, _: [held], range(3000), h), lambda c: bottom(c)),
    "deep tuple": (lambda h: functools.reduce(lambda held, _: (held,), range(3000), h), lambda c: bottom(c)),
}  # fmt: skip

# Those that can hold a tensor and nothing else.
OF_TENSORS = {
    "tensordict": (lambda h: TensorDict({"a": {"b": h}}), lambda c: c["a", "b"]),
    "tensorclass": (lambda h: Tensors(held=h, batch_size=[]), lambda c: c.held),
    "normal": (lambda h: distributions.Normal(h, 1.0, validate_args=False), lambda c: c.loc),
    "sac": (sac, lambda c: c.log_prob(torch.full((SIZE,), 0.5))),
    "sac in a dict": (lambda h: {"d": sac(h)}, lambda c: c["d"].log_prob(torch.full((SIZE,), 0.5))),
    "mixture": (mixture, lambda c: c.log_prob(torch.ones(SIZE))),
    "inverse": (inverse, lambda c: (c[0](torch.ones(SIZE)), c[0].inv(torch.ones(SIZE)), c[1](torch.ones(SIZE)))),
    "inverse made before": (lambda h: inverse(h)[0], lambda c: c.inv(torch.ones(SIZE))),
    "packed sequence": (lambda h: nn.utils.rnn.pack_sequence([h]), lambda c: c.data),
    "packed view": (lambda h: nn.utils.rnn.PackedSequence(h, torch.ones(SIZE, dtype=torch.long)), lambda c: c.data),
    "return type": (lambda h: torch.return_types.max((h, h)), lambda c: c.values),
    "model output": (model_output, lambda c: (c.last_hidden_state, c["hidden_states"][0])),
    "sparse": (lambda h: torch.sparse_coo_tensor(torch.arange(SIZE)[None], h, (SIZE,)), lambda c: c.to_dense()),
    "csr": (lambda h: torch.sparse_csr_tensor(torch.tensor([0, SIZE]), torch.arange(SIZE), h), lambda c: c.to_dense()),
    "nested": (lambda h: torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 1, SIZE])), lambda c: c.values()),
    "conjugate": (lambda h: torch.complex(h, h).conj(), lambda c: c.resolve_conj()),
    "builtin method": (lambda h: h.numpy, lambda c: c()),
    "capsule": (lambda h: h.__dlpack__(), torch.from_dlpack),
    "buffer": (lambda h: memoryview(h.numpy()), np.asarray),
    "cast buffer": (lambda h: memoryview(h.numpy()).cast("B"), np.asarray),
}  # fmt: skip

LEAVES = {
    "parameter": (lambda m: m.weight, lambda leaf: leaf),
    "view": (lambda m: m.weight.view(2, 2)[:, 1], lambda leaf: leaf),
    "buffer": (lambda m: m.noise[:], lambda leaf: leaf),
    "expanded": (lambda m: m.scalar.expand(SIZE), lambda leaf: leaf),
    "slice": (lambda m: m.weight[0:1], lambda leaf: leaf),
    "array": (lambda m: m.weight.numpy(), lambda leaf: leaf),
    "reversed array": (lambda m: m.weight.numpy()[::-1], lambda leaf: leaf),
    "array of a buffer": (lambda m: m.noise.numpy()[1:], lambda leaf: leaf),
    "memory": (lambda m: memoryview(m.weight.numpy()), np.asarray),
    "storage": (lambda m: m.weight.untyped_storage(), lambda leaf: bytes(leaf.tolist()[:16])),
    "typed storage": (lambda m: m.noise._typed_storage(), lambda leaf: leaf.tolist()[:SIZE]),
}


def bottom(held):
    while type(held) in (list, tuple):
        (held,) = held
    return held


def boxed(held):
    made = np.empty(1, object)
    made[0] = held
    return made


class Returns(nn.Module):
    """Returns what `make` makes of it."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 1 + SIZE), requires_grad=False)
        self.scalar = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("noise", torch.rand(SIZE))
        self.make = make

    def forward(self):
        return self.make(self)

    def get(self):
        return self.make(self)

    def step(self):
        return (yield self.make(self))

    def late(self):
        yield
        return self.make(self)

    def fail(self):
        raise Found(self.make(self))


class Found(BaseException):  # as an interrupt is
    def __init__(self, held):
        super().__init__("found", held)
        self.held = held


def returned(module):
    generator = module.late()
    next(generator)
    try:
        next(generator)
    except StopIteration as stop:
        return stop.value


def raised(module):
    with pytest.raises(Found) as found:
        module.fail()
    return found.value


WAYS = {
    "call": lambda module, sub: module(),
    "method": lambda module, sub: module.get(),
    "generator": lambda module, sub: next(module.step()),
    "generator's value": lambda module, sub: returned(module),
    "error": lambda module, sub: raised(module).held,
    "error's arguments": lambda module, sub: raised(module).args[1],
    "run": lambda module, sub: sub.run(lambda: module.make(module)),
}


def seen(value):
    """What the value is now, kept."""
    if isinstance(value, (tuple, list)):
        return [seen(each) for each in value]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return np.array(value.detach().numpy() if isinstance(value, torch.Tensor) else value).tolist()
    return value


def check(make, look, way, slots, publisher, subscriber, **options):
    """Does what was returned stay as it is? False: it was refused."""
    trainer, worker = Returns(None), Returns(make)
    pub = publisher(trainer, slots=slots)
    sub = subscriber(pub)
    sub.bind(worker, **options)
    try:
        found = WAYS[way](worker, sub)
    except shmsync.ProtocolError as error:
        said = str(error)
        return not ("return" in said and "clone()" in said) and said
    before, expected = seen(look(found)), seen(look(make(trainer)))
    assert before == expected
    for _ in range(3):
        with torch.no_grad():
            for tensor in (trainer.weight, trainer.scalar, trainer.noise):
                tensor.mul_(3).add_(1)
        pub.publish()
        sub.refresh()
        worker.eval()
    assert seen(look(found)) == before
    return True


REFUSED = {
    "closure", "default", "iterator", "map", "generator in a tuple", "values", "builtin method", "capsule",
    "deep tuple",
}  # fmt: skip


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("leaf", LEAVES)
def test_what_leaves_a_section_does_not_change(container, leaf, way, slots, publisher, subscriber):
    hold, look = CONTAINERS[container]
    take, see = LEAVES[leaf]
    kept = check(lambda m: hold(take(m)), lambda c: see(look(c)), way, slots, publisher, subscriber)
    assert kept == (container not in REFUSED and "storage" not in leaf)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("container", OF_TENSORS)
def test_what_holds_tensors_alone_does_not_change(container, way, slots, publisher, subscriber):
    hold, look = OF_TENSORS[container]
    assert check(lambda m: hold(m.weight.detach()), look, way, slots, publisher, subscriber) == (
        container not in REFUSED
    )


@pytest.mark.parametrize("way", ["call", "method"])
def test_without_copies_it_is_the_weights(way, bound):
    def make(module):
        return {Plain(module.weight), Plain(iter([module.weight]))}

    _, worker, _, sub = bound(lambda: Returns(make), clone_outputs=False)
    with sub.read():
        assert worker.weight in {each.held for each in WAYS[way](worker, sub) if isinstance(each.held, torch.Tensor)}


def test_one_object_stays_one_and_the_modules_own_stay(bound):
    def make(module):
        if not hasattr(module, "kept"):
            module.kept = Plain([module.weight])
            module.names = Plain("names")
        return {"a": module.kept, "b": [module.kept, module.kept.held], "names": module.names, "module": module}

    _, worker, _, _ = bound(lambda: Returns(make))
    out = worker()
    kept = worker.kept
    assert kept.held[0] is worker.weight and out["a"] is not kept
    assert out["a"] is out["b"][0] and out["b"][1] is out["a"].held
    assert out["names"] is worker.names and out["module"] is worker


def test_what_reaches_too_much_is_refused(bound):
    _, worker, _, _ = bound(lambda: Returns(lambda m: [Plain(None) for _ in range(30_000)]))
    with pytest.raises(shmsync.ProtocolError, match="more than 20000 objects"):
        worker()


def test_the_refusal_says_where_the_views_are(bound):
    _, worker, _, _ = bound(lambda: Returns(lambda m: {"a": Plain(iter([m.weight]))}))
    with pytest.raises(shmsync.ProtocolError, match=r"list_iterator in .*Plain in dict, which cannot be copied"):
        worker()
