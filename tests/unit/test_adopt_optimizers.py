"""An optimizer of an adopted module does what it does to a module of its own, and its steps reach the workers."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR, StepLR
from torch.optim.optimizer import _global_optimizer_pre_hooks

import shmsync

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD, fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "SGD, foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "Adam": (torch.optim.Adam, {}),
    "Adam, fused": (torch.optim.Adam, {"fused": True}),
    "Adam, fused, amsgrad": (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    "Adam, foreach": (torch.optim.Adam, {"foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "Adagrad, fused": (torch.optim.Adagrad, {"fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "Rprop": (torch.optim.Rprop, {}),
}


def convolution(memory_format=torch.contiguous_format):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)).to(memory_format=memory_format)


def learn(module, optimizer, seed, step=None, set_to_none=True):
    torch.manual_seed(seed)
    module(torch.randn(2, 3, 5, 5)).sigmoid().square().mean().backward()
    (step or optimizer.step)()
    optimizer.zero_grad(set_to_none=set_to_none)


def assert_equal(module, other):
    for (key, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


class Twins:
    """A module to adopt and one to compare it with, both with an optimizer that has a state already."""

    def __init__(self, make, optimizer, steps=3, **options):
        self.module, self.other = make(), make()
        self.optimizer = optimizer(self.module.parameters(), **options)
        self.others = optimizer(self.other.parameters(), **options)
        self.seed = 0
        self.learn(steps)

    def learn(self, steps=1, **options):
        for _ in range(steps):
            self.seed += 1
            learn(self.module, self.optimizer, self.seed, **options)
            learn(self.other, self.others, self.seed)

    def check(self, pub, sub):
        assert_equal(self.module, self.other)
        weights = sub.snapshot().weights
        for key, tensor in self.module.state_dict().items():
            assert torch.equal(weights[tuple(key.split("."))], tensor), key


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("known", [True, False], ids=["given to adopt()", "not given"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_it_would_without(publisher, subscriber, kind, known, set_to_none, memory_format):
    optimizer, options = OPTIMIZERS[kind]
    twins = Twins(lambda: convolution(memory_format), optimizer, lr=0.001, **options)
    twins.learn(set_to_none=set_to_none)
    pub = publisher(twins.module)
    sub = subscriber(pub)
    pub.adopt(twins.module, twins.optimizer if known else None)
    for _ in range(5):
        if known:
            twins.learn(set_to_none=set_to_none)
        else:
            with pub.update():
                twins.learn(set_to_none=set_to_none)
        twins.check(pub, sub)
    # A checkpoint whose state lies in memory as it did before adopt().
    twins.optimizer.load_state_dict(copy.deepcopy(twins.others.state_dict()))
    for _ in range(2):
        with pub.update():
            twins.learn()
        twins.check(pub, sub)
    pub.close()
    twins.learn(2)
    assert_equal(twins.module, twins.other)


def test_weights_that_come_in_another_order_take_the_state_with_them(publisher, subscriber):
    twins = Twins(convolution, torch.optim.Adam, lr=0.001, fused=True)
    pub = publisher(twins.module)
    sub = subscriber(pub)
    pub.adopt(twins.module, twins.optimizer)
    twins.learn()
    for each in (twins.module, twins.other):
        each.to(memory_format=torch.channels_last)
    for state in (*twins.optimizer.state.values(), *twins.others.state.values()):
        for name in ("exp_avg", "exp_avg_sq"):
            if state[name].dim() == 4:
                state[name] = state[name].contiguous(memory_format=torch.channels_last)
    twins.learn(3)
    twins.check(pub, sub)


def test_state_that_is_part_of_larger_memory_and_would_have_to_be_laid_out_anew_is_refused(publisher):
    module = convolution(torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, fused=True)
    learn(module, optimizer, 1)
    state = optimizer.state[module[0].weight]
    flat = torch.zeros(2 * state["exp_avg"].numel())
    place = torch.as_strided(flat, state["exp_avg"].shape, state["exp_avg"].stride())
    place.copy_(state["exp_avg"])
    state["exp_avg"] = place
    before = module[0].weight.data_ptr()
    pub = publisher(module)
    with pytest.raises(shmsync.ManifestMismatch, match=r"exp_avg \(4, 3, 3, 3\) is a view of a larger tensor"):
        pub.adopt(module, optimizer)
    assert module[0].weight.data_ptr() == before and pub.version == 1
    learn(module, optimizer, 2)
    assert pub.version == 1


def test_sparse_gradients_that_are_there_already_are_kept(publisher):
    module = nn.Embedding(4, 2, sparse=True)
    module.weight.data = torch.zeros(2, 4).t()
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=1.0)
    module(torch.tensor([1])).sum().backward()
    pub = publisher(module)
    pub.adopt(module, optimizer)
    optimizer.step()
    assert pub.version == 2
    torch.testing.assert_close(pub.weights["weight"], torch.tensor([[0.0, 0], [-1, -1], [0, 0], [0, 0]]))


def test_state_that_is_the_parameters_own_memory_stays_so(publisher):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    optimizer.state[module.weight]["slow"] = module.weight.data
    pub = publisher(module)
    pub.adopt(module, optimizer)
    module.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(optimizer.state[module.weight]["slow"], module.weight)
    pub.close()
    module.weight.data.add_(1)
    assert torch.equal(optimizer.state[module.weight]["slow"], module.weight)
    other = publisher(module)
    optimizer.state[module.weight]["slow"] = module.weight.data[0]
    with pytest.raises(shmsync.ManifestMismatch, match="slow of parameter 0 in the SGD's state"):
        other.adopt(module, optimizer)


# ---- memory that tensors of the module share


class Sharing(nn.Module):
    def __init__(self, view=lambda weight: weight):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))
        self.register_buffer("shown", view(self.weight.data))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = nn.Parameter(self.weight.data)  # another Parameter over the same memory
        self.plain = self.weight.data


def test_what_shares_a_parameters_memory_goes_where_it_goes(publisher, subscriber):
    module = Sharing()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    pub = publisher(module)
    sub = subscriber(pub)
    pub.adopt(module, optimizer)
    for value in (-1, -2):
        module.weight.grad = torch.ones(3, 3)
        optimizer.step()
        for tensor in (module.weight, module.shown, module.head.weight, module.plain):
            assert (tensor == value).all()
        weights = sub.snapshot().weights
        assert all((weights[key] == value).all() for key in ("weight", "shown", ("head", "weight")))
    assert pub.publish() == 4
    pub.close()
    module.weight.data.fill_(7)
    for tensor in (module.shown, module.head.weight, module.plain):
        assert (tensor == 7).all()


def test_what_shares_memory_and_is_left_out_of_the_arena_goes_with_it_too(publisher):
    module = Sharing()
    pub = publisher(module, exclude=["shown", "head.*"])
    pub.adopt(module)
    with pub.update() as weights:
        weights["weight"].fill_(5)
    for tensor in (module.shown, module.head.weight, module.plain):
        assert (tensor == 5).all()


@pytest.mark.parametrize("view", [lambda w: w[0], lambda w: w.t(), lambda w: w.view(9), lambda w: w[1:]])
def test_memory_that_is_shared_in_part_is_refused(publisher, view):
    module = Sharing(view)
    pub = publisher(module)
    with pytest.raises(shmsync.ManifestMismatch, match="share memory in part"):
        pub.adopt(module)
    assert module.plain.data_ptr() == module.weight.data_ptr()


def test_parameters_side_by_side_in_one_storage_are_no_trouble(publisher):
    module = nn.Linear(2, 2)
    flat = torch.arange(6.0)
    module.weight.data, module.bias.data = flat[:4].view(2, 2), flat[4:]
    pub = publisher(module)
    pub.adopt(module)
    assert pub.weights["weight"].tolist() == [[0, 1], [2, 3]] and pub.weights["bias"].tolist() == [4, 5]


def test_one_module_has_one_arena(publisher, subscriber):
    module = nn.Linear(2, 2)
    pub, other = publisher(module), publisher(module)
    pub.adopt(module)
    with pytest.raises(shmsync.ProtocolError, match=f"adopted by arena '{pub.name}' already"):
        other.adopt(module)
    pub.close()
    other.adopt(module)
    worker = subscriber(other).bind(nn.Linear(2, 2))
    with pytest.raises(shmsync.ProtocolError, match="bound to a Subscriber"):
        publisher({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}).adopt(worker)


# ---- optimizers that come, go and are wrapped


def test_adopting_and_closing_leaves_the_optimizer_as_it_was():
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = dict(vars(optimizer))
    for cycle in range(1200):
        with shmsync.Publisher(module) as pub:
            pub.adopt(module, optimizer)
            if cycle % 400 == 0:
                module.weight.grad = torch.ones(2, 2)
                optimizer.step()
                assert pub.version == 2
    assert vars(optimizer) == before and not optimizer._optimizer_step_pre_hooks
    assert optimizer.step.__func__ is type(optimizer).step


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("made", ["before", "after"])
def test_schedulers_and_many_cycles(made):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def schedule():
        return SequentialLR(optimizer, [StepLR(optimizer, 1), CosineAnnealingLR(optimizer, 5)], milestones=[3])

    scheduler = schedule() if made == "before" else None
    for _ in range(1200):
        with shmsync.Publisher(module) as pub:
            pub.adopt(module, optimizer)
            scheduler = scheduler or schedule()
    for number in range(3):
        with shmsync.Publisher(module) as pub:
            pub.adopt(module, optimizer)
            for version in (2, 3):
                module.weight.grad = torch.ones(2, 2)
                optimizer.step()
                scheduler.step()
                assert pub.version == version, number
    module.weight.grad = torch.ones(2, 2)
    optimizer.step()


def test_two_modules_with_one_optimizer_step_in_both_arenas(publisher, subscriber):
    generator, judge = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*generator.parameters(), *judge.parameters()], lr=1.0)
    pubs = [publisher(generator), publisher(judge)]
    for pub, module in zip(pubs, (generator, judge), strict=True):
        pub.adopt(module, optimizer)
    for parameter in (*generator.parameters(), *judge.parameters()):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [pub.version for pub in pubs] == [2, 2]
    pubs[0].close()
    optimizer.step()
    assert pubs[1].version == 3
    pubs[1].close()
    optimizer.step()


def test_several_optimizers_of_one_module(publisher):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = (torch.optim.SGD(layer.parameters(), lr=1.0) for layer in module)
    pub = publisher(module)
    pub.adopt(module, [first, second])
    for number, optimizer in enumerate([first, second, first], 2):
        optimizer.step()
        assert pub.version == number
    with pytest.raises(ValueError, match="none of them"):
        pub.adopt(module, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))


@pytest.mark.parametrize("wrong", ["adam", [nn.Linear(2, 2)], iter(())])
def test_what_is_no_optimizer_is_refused(publisher, wrong):
    module = nn.Linear(2, 2)
    pub = publisher(module)
    address = module.weight.data_ptr()
    with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer, or a list of them, not a"):
        pub.adopt(module, wrong)
    assert module.weight.data_ptr() == address


def test_a_publisher_that_nobody_closed_leaves_no_hook():
    hooks = _global_optimizer_pre_hooks
    before = len(hooks)
    module = nn.Linear(2, 2)
    pub = shmsync.Publisher(module)
    pub.adopt(module)
    module.weight = nn.Parameter(torch.ones(2, 2))
    with pub.update():
        pass
    assert len(hooks) == before + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del pub
        gc.collect()
    assert len(hooks) == before


def test_gradient_scaling_joins_the_step(publisher, subscriber):
    twins = Twins(convolution, torch.optim.SGD, lr=0.01)
    pub = publisher(twins.module)
    sub = subscriber(pub)
    pub.adopt(twins.module, twins.optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for version in (2, 3):
        twins.learn(step=lambda: (scaler.scale(torch.ones(1)), scaler.step(twins.optimizer), scaler.update()))
        assert pub.version == version
        twins.check(pub, sub)
    twins.module[0].weight.grad = torch.full_like(twins.module[0].weight, float("inf"))
    scaler.scale(torch.ones(1))
    scaler.step(twins.optimizer)
    assert pub.version == 3  # the scaler left this step out


def test_averages_of_the_weights(publisher):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    average = swa_utils.AveragedModel(module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    pub = publisher(module)
    pub.adopt(module, optimizer)
    handle = optimizer.register_step_post_hook(lambda *_: average.update_parameters(module))
    expected = None
    for _ in range(3):
        module.weight.grad = torch.ones(2, 2)
        optimizer.step()
        now = module.weight.detach().clone()
        expected = now if expected is None else expected * 0.5 + now * 0.5
        torch.testing.assert_close(average.module.weight, expected)
    handle.remove()


def test_a_closure_runs_inside_the_section(publisher):
    module = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1)
    pub = publisher(module)
    pub.adopt(module, optimizer)
    x = torch.ones(4, 2)

    def loss():
        optimizer.zero_grad()
        value = module(x).square().mean()
        value.backward()
        return value

    first = optimizer.step(loss)
    assert pub.version == 2 and loss() < first
    assert torch.equal(pub.weights["weight"], module.weight)


def test_a_copy_of_an_optimizer_is_nobodys(publisher):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    pub = publisher(module)
    pub.adopt(module, optimizer)
    twin_module, twin = copy.deepcopy((module, optimizer))
    for parameter in twin_module.parameters():
        parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert pub.version == 1 and not torch.equal(twin_module.weight, module.weight)


# ---- parameters that were replaced


def test_an_optimizer_that_would_step_what_is_gone_is_refused(publisher, subscriber):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    pub = publisher(module)
    sub = subscriber(pub)
    pub.adopt(module, optimizer)
    module.load_state_dict({key: torch.ones_like(t) for key, t in module.state_dict().items()}, assign=True)
    for _ in range(2):
        with pytest.raises(shmsync.ProtocolError, match="0.weight, 0.bias, 1.weight, 1.bias of the adopt"):
            optimizer.step()
    assert pub.version == 1
    with pub.update():  # who steps nothing may go on
        pass
    with pytest.raises(shmsync.ProtocolError, match="would reach nobody"):
        optimizer.step()
    del optimizer
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    pub.adopt(module, optimizer)
    module[0].weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert pub.version == 3 and (sub.snapshot().weights["0", "weight"] == 0).all()


def test_an_optimizer_that_was_given_the_new_parameter_goes_on(publisher):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    pub = publisher(module)
    pub.adopt(module, optimizer)
    module.weight = nn.Parameter(torch.ones(2, 2))
    optimizer.param_groups[0]["params"][0] = module.weight
    module.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert (pub.weights["weight"] == 0).all()


@pytest.mark.parametrize("when", ["before update()", "inside update()"])
def test_an_optimizer_that_adopt_does_not_know_is_warned(publisher, when):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    pub = publisher(module)
    pub.adopt(module)
    if when == "inside update()":
        with pub.update():
            module.weight = nn.Parameter(torch.ones(2, 2))
    else:
        module.weight = nn.Parameter(torch.ones(2, 2))
    with pub.update(), pytest.warns(UserWarning, match="steps weight, but the adopted module has another"):
        optimizer.step()
    with warnings.catch_warnings(), pub.update():
        warnings.simplefilter("error")
        optimizer.step()  # once
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.step()
    pub.close()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(module.parameters(), lr=1.0).step()


# ---- compiled steps


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    yield lambda function: torch.compile(function, backend=backend), graphs
    torch._dynamo.reset()


def with_gradients(module):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return module


def test_a_step_that_is_compiled_after_adopt_is_a_version(publisher, subscriber, compiled):
    compile, graphs = compiled
    module, other = with_gradients(nn.Linear(2, 2)), with_gradients(nn.Linear(2, 2))
    other.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, foreach=True)
    others = torch.optim.SGD(other.parameters(), lr=1.0)
    pub = publisher(module)
    sub = subscriber(pub)
    pub.adopt(module, optimizer)
    step = compile(optimizer.step)
    for version in range(2, 6):
        if version % 2:
            with pub.update():
                step()
        else:
            step()
        others.step()
        assert pub.version == version
        torch.testing.assert_close(sub.snapshot().weights["weight"], other.weight.detach())
    assert len(graphs) == 1
    pub.close()
    step()
    others.step()
    assert torch.equal(module.weight, other.weight)


@pytest.mark.parametrize("how", ["taken", "compiled"])
def test_a_step_that_was_taken_before_adopt_is_refused_outside_update(publisher, subscriber, compiled, how):
    compile, graphs = compiled
    module = with_gradients(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, foreach=True)
    step = compile(optimizer.step) if how == "compiled" else optimizer.step
    step()
    pub = publisher(module)
    sub = subscriber(pub)
    pub.adopt(module, optimizer)
    before = module.weight.detach().clone()
    with pytest.raises(shmsync.ProtocolError, match=r"SGD\.step was taken or compiled before adopt\(\)"):
        step()
    assert torch.equal(module.weight, before) and pub.version == 1
    for version in (2, 3):
        with pub.update():
            step()
        assert pub.version == version
        torch.testing.assert_close(sub.snapshot().weights["weight"], before - (version - 1))
    assert len(graphs) == (how == "compiled")
    with pytest.raises(ZeroDivisionError), pub.update():
        raise ZeroDivisionError
    with pytest.raises(shmsync.ProtocolError):
        step()
    pub.close()
    step()
