"""step() of an optimizer of an adopted module: it comes, goes, is wrapped, compiled, and steps what the module has."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import shmsync

# ---- optimizers that come, go and are wrapped


def test_two_modules_with_one_optimizer_step_in_both_arenas(publisher):
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


def test_several_optimizers_of_one_module(adopted):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = (torch.optim.SGD(layer.parameters(), lr=1.0) for layer in module)
    pub, _ = adopted(module, [first, second])
    for number, optimizer in enumerate([first, second, first], 2):
        optimizer.step()
        assert pub.version == number


NO_OPTIMIZER = r"takes a torch\.optim\.Optimizer, or a list of them, not a"


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ("adam", TypeError, NO_OPTIMIZER),
        ([nn.Linear(2, 2)], TypeError, NO_OPTIMIZER),
        (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), ValueError, "none of them"),
    ],
)
def test_what_is_no_optimizer_of_the_module_is_refused(publisher, wrong, error, said):
    module = nn.Linear(2, 2)
    pub = publisher(module)
    address = module.weight.data_ptr()
    with pytest.raises(error, match=said):
        pub.adopt(module, wrong)
    assert module.weight.data_ptr() == address
    pub.adopt(module)


def test_a_publisher_that_nobody_closed_leaves_the_module_and_no_hook():
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
    with torch.no_grad():
        module.weight.add_(1)  # private again
    module.load_state_dict(nn.Linear(2, 2).state_dict())


def test_a_closure_runs_inside_the_section(adopted):
    module = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1)
    pub, _ = adopted(module, optimizer)
    x = torch.ones(4, 2)

    def loss():
        optimizer.zero_grad()
        value = module(x).square().mean()
        value.backward()
        return value

    first = optimizer.step(loss)
    assert pub.version == 2 and loss() < first
    assert torch.equal(pub.weights["weight"], module.weight)


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


@pytest.mark.parametrize("how", ["taken", "compiled"])
def test_a_step_that_was_taken_before_adopt_is_refused_outside_update(adopted, compiled, how):
    compile, graphs = compiled
    module = with_gradients(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, foreach=True)
    step = compile(optimizer.step) if how == "compiled" else optimizer.step
    step()
    pub, sub = adopted(module, optimizer)
    before = module.weight.detach().clone()
    with pytest.raises(shmsync.ProtocolError, match="SGD steps parameters of an adopted module outside"):
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
