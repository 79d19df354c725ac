"""What tools make of a bound module keeps the weights of its version, or is refused with the way that works."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import shmsync
from support.calls import meanwhile
from support.processes import no_monitor
from support.weights import step

X = torch.randn(3, 4)
no_monitor()
pytestmark = pytest.mark.filterwarnings("ignore")


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        return self.out(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = Head()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.head(self.body(x)) * self.scale + self.shift

    def act(self, x):
        return x @ self.head.out.weight.t() * self.scale


class Around(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.inner = module

    def forward(self, x):
        return self.inner(x)


def exported(module, **options):
    return torch.export.export(module, (X,), **options).module()


def stacked(module):
    base = copy.deepcopy(module).to("meta")
    parameters, buffers = ({k: v[0] for k, v in each.items()} for each in torch.func.stack_module_state([module]))
    return lambda x: torch.func.functional_call(base, (parameters, buffers), (x,))


def all_traced(module):
    tracer = torch.fx.Tracer()
    tracer.is_leaf_module = lambda *_: False
    return torch.fx.GraphModule(module, tracer.trace(module))


def prepared(module):
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    return quantize_fx.prepare_fx(module, get_default_qconfig_mapping(), (X,))


def replica(module):
    return module._replicate_for_data_parallel()


def converted(module):
    try:
        torch.onnx.export(module, (X,), io.BytesIO(), dynamo=False)
    finally:
        torch.set_autocast_cache_enabled(True)  # torch leaves it off after an exception


def distributed(module):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(module)
    finally:
        torch.distributed.destroy_process_group()


COPIES = {
    "copy.deepcopy": copy.deepcopy,
    "stack_module_state": stacked,
    "quantize_dynamic": lambda module: torch.ao.quantization.quantize_dynamic(module, {nn.ReLU}),
    "a copy, traced": lambda module: torch.jit.trace(copy.deepcopy(module), X),
    "a copy, exported": lambda module: exported(copy.deepcopy(module)),
    "a copy, in fx": lambda module: torch.fx.symbolic_trace(copy.deepcopy(module)),
}
SHARED = {
    "jit.trace": lambda module: torch.jit.trace(module, X),
    "jit.trace of a function": lambda module: torch.jit.trace(lambda x: module(x), X),
    "jit.trace of a part": lambda module: torch.jit.trace(module.head, X),
    "jit.trace of a whole": lambda module: torch.jit.trace(Around(module), X),
    "onnx.export": converted,
    "jit.trace_module": lambda module: torch.jit.trace_module(module, {"act": X}),
    "jit.script": torch.jit.script,
    "jit.script of a whole": lambda module: torch.jit.script(Around(module)),
    "export": exported,
    "export, strict": lambda module: exported(module, strict=True),
    "export of a whole": lambda module: exported(Around(module)),
    "copy.copy": copy.copy,
    "copy.copy of a part": lambda module: copy.copy(module.body),
    "fx.symbolic_trace": torch.fx.symbolic_trace,
    "fx, to the bottom": all_traced,
    "prepare_fx": prepared,
    "DataParallel": replica,
    "DistributedDataParallel": distributed,
}
GUARDED = {
    "jit.trace of a method": lambda module: torch.jit.trace(lambda x: module.act(x), X),
    "make_fx": lambda module: make_fx(module)(X),
    "make_fx of a method": lambda module: make_fx(lambda x: module.act(x))(X),
}
GUARDS = [True, ["forward", "act"], False]


@pytest.fixture(autouse=True)
def no_gradients():
    torch.compiler.reset()
    with torch.no_grad():
        yield


def section(sub, guard):
    return nullcontext() if guard else sub.read()


def assert_still_right(trainer, worker, pub, sub):
    for _ in range(2):
        step(trainer)
        pub.publish()
        with sub.read():
            assert torch.equal(worker(X), trainer(X))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("guard", GUARDS, ids=str)
@pytest.mark.parametrize("tool", COPIES)
def test_a_copy_keeps_the_weights_of_its_version(bound, tool, guard, slots):
    trainer, worker, pub, sub = bound(Net, slots, guard=guard)
    step(trainer)
    pub.publish()
    with section(sub, guard):
        if tool == "stack_module_state":
            sub.refresh()  # it reads the tensors without a call
        made = COPIES[tool](worker)
    expected = trainer(X)
    for _ in range(3):
        torch.testing.assert_close(made(X), expected)
        step(trainer)
        pub.publish()
    assert_still_right(trainer, worker, pub, sub)


REFUSED = [(SHARED[tool], tool, guard) for tool in SHARED for guard in GUARDS]
REFUSED += [(GUARDED[tool], tool, guard) for tool in GUARDED for guard in GUARDS[:2]]


@pytest.mark.parametrize(("tool", "guard"), [pytest.param(t, g, id=f"{n}-{g}") for t, n, g in REFUSED])
def test_what_would_share_its_tensors_or_record_a_guarded_call_is_refused(bound, tool, guard):
    trainer, worker, pub, sub = bound(Net, 2, guard=guard)
    with pytest.raises(shmsync.ProtocolError, match=r"copy\.deepcopy\(module\)"), section(sub, guard):
        tool(worker)
    assert_still_right(trainer, worker, pub, sub)


@pytest.mark.parametrize("tool", ["jit.trace", "jit.script", "export", "copy.copy", "fx.symbolic_trace"])
def test_tools_work_when_nothing_of_the_module_is_bound_any_more(tool):
    worker = Net()
    with shmsync.Publisher(Net()) as pub, shmsync.Subscriber(pub.handle) as sub:
        sub.bind(worker, guard=False)
    SHARED[tool](worker)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_trace_made_before_is_right_inside_sections(both, slots):
    trainer, worker = Net(), Net()
    pub, sub = both(trainer, slots=slots)
    traced = torch.jit.trace(worker, X)
    sub.bind(worker)
    for _ in range(3):
        step(trainer)
        pub.publish()
        with sub.read():
            torch.testing.assert_close(traced(X), trainer(X))


def test_other_threads_may_trace_and_compile_meanwhile(bound):
    _, worker, _, _ = bound(Net, 2)

    def use():
        worker.act(X)
        list(worker.parameters())

    with meanwhile(use):
        for _ in range(20):
            make_fx(lambda x: x.sin() + 1)(X)
        exported(Head())


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
def test_a_deep_copy_is_made_in_one_section(bound, monkeypatch, consistency):
    trainer, worker, pub, _ = bound(Net, 3, consistency)
    copied, expected = nn.Parameter.__deepcopy__, trainer(X)

    def meanwhile(parameter, memo):
        step(trainer)
        pub.publish()
        return copied(parameter, memo)

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", meanwhile)
    torch.testing.assert_close(copy.deepcopy(worker)(X), expected)


def test_a_copy_has_nothing_of_the_watch(bound):
    _, worker, _, _ = bound(Net)
    twin = copy.deepcopy(worker)
    added = {name for module in twin.modules() for name in vars(module)} - {
        name for module in Net().modules() for name in vars(module)
    }
    assert added <= {"forward", "act", "_compiled_call_impl", "_call_impl", "compile", "load_state_dict",
                     "_load_from_state_dict"}  # fmt: skip
    twin.double()
