"""torch.compile(), DataParallel, DDP and AveragedModel: the same keys as the module inside, on both sides."""

from __future__ import annotations

import functools
import multiprocessing

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn
from torch.optim.swa_utils import AveragedModel

import shmsync
from shmsync.engine.source.wrappers import unwrapped
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightStrategy
from support.weights import fill

pytestmark = [
    pytest.mark.usefixtures("one_rank"),  # DDP needs a group
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


class Net(nn.Module):
    """Its children have the names of what wrappers use, and it has extra state."""

    def __init__(self, value=0.0):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.BatchNorm1d(2)
        self.told = value
        fill(self, value)

    def forward(self, x):
        return self._orig_mod(self.module(x))


class Policy(nn.Module):
    """As most modules are: no name in it is that of a wrapper's."""

    def __init__(self, value=0.0):
        super().__init__()
        self.first, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        fill(self, value)

    def forward(self, x):
        return self.norm(self.first(x))


class Head(nn.Module):
    """Its only child is called `module`."""

    def __init__(self, value=0.0):
        super().__init__()
        self.module = nn.Linear(2, 2)
        fill(self, value)


def compiled(module):
    return torch.compile(module, backend="eager")


def part_compiled(module):
    name = next(iter(module._modules))
    module._modules[name] = compiled(module._modules[name])
    return module


WRAPPERS = {
    "plain": lambda module: module,
    "compiled": compiled,
    "part compiled": part_compiled,
    "compiled twice": lambda module: compiled(part_compiled(module)),
    "DataParallel": nn.DataParallel,
    "DDP": nn.parallel.DistributedDataParallel,
    "compiled DDP": lambda module: compiled(nn.parallel.DistributedDataParallel(module)),
    "AveragedModel": AveragedModel,
    "AveragedModel of compiled": lambda module: AveragedModel(compiled(module)),
    "part averaged": lambda module: AveragedModel(part_compiled(module)),
}
AS = {
    "module": lambda module: module,
    "state_dict": lambda module: module.state_dict(),
    "tensordict": TensorDict.from_module,
}


def values_in(module):
    return {t.unique().item() for name, t in module.state_dict().items() if not name.endswith("n_averaged")}


def has_the_keys_of(kind, pub):
    return set(pub.weights.flatten_keys(".").keys()) == set(kind().state_dict())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_publisher_has_the_keys_of_the_module_inside(publisher, wrapper):
    assert has_the_keys_of(Net, publisher(WRAPPERS[wrapper](Net(1.0))))


@pytest.mark.parametrize("form", ["module", "state_dict"])
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("kind", [Policy, Net])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weight_strategies(publisher, wrapper, kind, strategy, form):
    """A module gives the keys of the module inside; weights with the keys of either go into modules in any wrapper."""
    strategy = WeightStrategy(strategy)
    extracted = strategy.extract_weights(AS[form](WRAPPERS[wrapper](kind(4.0))))
    if form == "module":
        assert has_the_keys_of(kind, publisher(extracted))
    for around in ("plain", "compiled", wrapper):
        target = WRAPPERS[around](kind(0.0))
        strategy.apply_weights(target, extracted)
        assert values_in(target) == {4.0}


def test_a_prefix_that_may_mean_two_leaves_is_not_guessed(publisher):
    pub = publisher(Net(0.0))
    with pytest.raises(shmsync.ManifestMismatch, match="module._orig_mod.weight is not in the arena"):
        pub.publish({"module._orig_mod.weight": torch.ones(2)})


def test_one_leaf_under_two_spellings_is_refused(publisher):
    pub = publisher({"weight": torch.zeros(2)})
    with pytest.raises(shmsync.ManifestMismatch, match="twice"):
        pub.publish({"weight": torch.ones(2), "_orig_mod.weight": torch.ones(2)})


def test_a_wrapper_is_told_by_its_type():
    net = Net(1.0)
    assert unwrapped(net) is net
    assert unwrapped(compiled(nn.DataParallel(net))) is net
    tdm = TensorDictModule(nn.Linear(1, 1), in_keys=["a"], out_keys=["b"])
    assert unwrapped(tdm) is tdm


def test_fsdp_is_refused_with_what_to_pass_instead(both):
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
    pub, sub = both(nn.Linear(2, 2))
    nested = nn.Sequential(module)
    for call in (
        lambda: shmsync.Publisher(module),
        lambda: pub.publish(nested),
        lambda: sub.bind(nested),
        lambda: WeightStrategy().extract_weights(module),
        lambda: WeightStrategy("state_dict").extract_weights(module),
    ):
        with pytest.raises(shmsync.ManifestMismatch, match="FullyShardedDataParallel.*full_state_dict"):
            call()
    assert pub.version == 1


@pytest.mark.parametrize(
    "callable_",
    [
        functools.partial(nn.Linear(1, 1)),
        functools.wraps(nn.Linear(1, 1).forward)(lambda x: x),
        nn.Linear(1, 1).forward,
    ],
    ids=["partial", "decorated", "method"],
)
def test_a_callable_around_a_module_is_a_type_error_that_names_it(callable_):
    with pytest.raises(TypeError, match="pass the Linear inside it"):
        shmsync.Publisher(callable_)


def nested_params(value):
    return TensorDictParams(TensorDict({"a": {"b": torch.full((2,), value)}, "c": torch.full((3,), value)}))


def test_tensordict_params_have_their_nested_keys_everywhere(publisher, subscriber):
    class Holder(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.params = nested_params(value)

    for make, keys in ((nested_params, {("a", "b"), "c"}), (Holder, {("params", "a", "b"), ("params", "c")})):
        pub = publisher(make(1.0))
        assert set(pub.weights.keys(True, True)) == keys
        pub.publish(WeightStrategy("tensordict").extract_weights(make(2.0)))
        pub.publish(WeightStrategy("state_dict").extract_weights(make(3.0)))
        worker = make(0.0)
        subscriber(pub).bind(worker, guard=False)
        assert {value.unique().item() for value in worker.parameters()} == {3.0}
        WeightStrategy().apply_weights(target := make(0.0), WeightStrategy().extract_weights(make(4.0)))
        assert {value.unique().item() for value in target.parameters()} == {4.0}


class Telling(nn.Linear):
    """Has state that is no tensor."""

    told = 0

    def get_extra_state(self):
        return self.told

    def set_extra_state(self, state):
        self.told = state


def test_extra_state_finds_its_module_through_a_wrapper():
    source = nn.Sequential(compiled(Telling(1, 1)))
    source[0]._orig_mod.told = 7
    into, strategy = nn.Sequential(Telling(1, 1)), WeightStrategy("state_dict")
    strategy.apply_weights(into, strategy.extract_weights(source))
    assert into[0].told == 7


@pytest.mark.parametrize("form", AS)
@pytest.mark.parametrize("worker", WRAPPERS)
@pytest.mark.parametrize("trainer", WRAPPERS)
@pytest.mark.parametrize("kind", [Policy, Net, Head])
def test_an_arena_of_any_form_serves_modules_in_any_wrapper(both, kind, trainer, worker, form):
    source, target = WRAPPERS[trainer](kind(1.0)), WRAPPERS[worker](kind(0.0))
    if form == "tensordict":
        source = source.cpu()
    pub, sub = both(AS[form](source))
    sub.bind(target, guard=False)
    assert values_in(target) == {1.0}
    for number, again in enumerate((form, "module", "state_dict"), start=2):
        fill(source, float(number))
        pub.publish(AS[again](source))
        sub.refresh()
        assert values_in(target) == {number}
    pub.publish(AS["state_dict"](kind(7.0)))
    sub.refresh()
    assert values_in(target) == {7.0}


def test_what_prefixes_leave_open_is_an_error_with_both_forms(publisher, subscriber):
    pub = publisher({"module.a.w": torch.zeros(1), "_orig_mod.a.w": torch.zeros(1), "b": torch.zeros(1)})
    worker = nn.Module()
    worker.a = nn.Module()
    worker.a.w = nn.Parameter(torch.zeros(1))
    worker.b = nn.Parameter(torch.zeros(1))
    with pytest.raises(shmsync.ManifestMismatch, match=r"a\.w may stand for _orig_mod\.a\.w or module\.a\.w"):
        subscriber(pub).bind(worker, guard=False)
    with pytest.raises(shmsync.ManifestMismatch, match=r"a\.w may stand for _orig_mod\.a\.w or module\.a\.w"):
        pub.publish({"a.w": torch.zeros(1)})


def test_a_name_that_is_a_wrappers_is_kept_where_it_fits(publisher, subscriber):
    """`module.weight` and `weight` are two leaves of one module."""

    class Both(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.module = nn.Linear(2, 2)

    pub = publisher(Both().state_dict())
    worker = Both()
    subscriber(pub).bind(worker, guard=False)
    for key, value in worker.state_dict().items():
        assert torch.equal(value, pub.weights[tuple(key.split("."))])


@pytest.mark.parametrize("form", ["module", "state_dict"])
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("trainer", ["plain", "compiled DDP", "AveragedModel of compiled"])
@pytest.mark.parametrize("scheme", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_schemes_over_pipes(scheme, trainer, strategy, form):
    ours, theirs = multiprocessing.Pipe()
    source, target = WRAPPERS[trainer](Net(0.0)), WRAPPERS["part compiled"](Net(0.0))
    with scheme(strategy=strategy) as sending, scheme(strategy=strategy) as receiving:
        sending.init_on_sender("policy", pipes=[ours])
        receiving.init_on_worker("policy", pipe=theirs, model=target)
        for value in (6.0, 7.0):
            fill(source, value)
            sending.get_sender().send_async(AS[form](source))
            while not receiving.get_receiver().receive(1.0):
                pass
            sending.get_sender().wait_async()
            assert values_in(target) == {value}
