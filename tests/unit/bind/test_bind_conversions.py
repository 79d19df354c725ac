"""Conversions of a bound module, and modules made and used in every mode of torch: bound tensors show the arena."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

import shmsync
from support.calls import switched
from support.jobs.engine import bind_copies
from support.processes import no_monitor
from support.weights import step

X = torch.randn(3, 4)
no_monitor()
pytestmark = pytest.mark.filterwarnings("ignore:a bound module ran with gradients on")


class Net(nn.Module):
    def __init__(self, recurrent=True):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.GRU(4, 4, batch_first=True) if recurrent else nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.eval()

    def forward(self, x):
        out = self.last(self.norm(self.first(x)).unsqueeze(1))
        return self.tied((out[0] if isinstance(out, tuple) else out).squeeze(1))


MOVING = {
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to(dtype)": lambda module: module.to(torch.float64),
    "to(dtype=)": lambda module: module.to(dtype=torch.float16),
    "type": lambda module: module.type(torch.float64),
    "a part": lambda module: module.first.double(),
    "a part with buffers": lambda module: module.norm.half(),
    "a recurrent part": lambda module: module.last.half(),
    "to(device)": lambda module: module.to("meta"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "share_memory": lambda module: module.share_memory(),
    "other values": lambda module: module._apply(lambda tensor: tensor * 2),
    "values in place": lambda module: module._apply(lambda tensor: tensor.zero_()),
}
STAYING = {
    "float": lambda module: module.float(),
    "to(dtype)": lambda module: module.to(torch.float32),
    "to(device)": lambda module: module.to("cpu"),
    "to(device, dtype)": lambda module: module.to("cpu", torch.float32, non_blocking=True),
    "cpu": lambda module: module.cpu(),
    "requires_grad_": lambda module: module.requires_grad_(False),
    "a part": lambda module: module.last.float(),
}


def places(module):
    return [(id(tensor), tensor.data_ptr(), tensor.dtype) for tensor in module.state_dict(keep_vars=True).values()]


@torch.no_grad()
def assert_right(trainer, worker, pub):
    for _ in range(2):
        assert torch.equal(worker(X), trainer(X))
        step(trainer)
        pub.publish()
    assert torch.equal(worker(X), trainer(X))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", ["bind", "bind_copies"])
@pytest.mark.parametrize("conversion", MOVING)
def test_what_would_leave_the_arena_is_refused_before_anything_changes(
    publisher, subscriber, conversion, how, inference
):
    trainer, worker = Net(), Net()
    pub = publisher(trainer, slots=2)
    (bind_copies if how == "bind_copies" else shmsync.Subscriber.bind)(subscriber(pub), worker)
    before = places(worker)
    refused = pytest.raises(shmsync.ProtocolError, match=r"Nothing was changed.*Publisher\(dtype=\)")
    with refused, torch.inference_mode(inference):
        MOVING[conversion](worker)
    assert places(worker) == before
    assert_right(trainer, worker, pub)


@pytest.mark.parametrize("conversion", STAYING)
def test_what_changes_nothing_goes_on_working(bound, conversion):
    trainer, worker, pub, _ = bound(Net, 2)
    before = places(worker)
    STAYING[conversion](worker)
    assert places(worker) == before
    assert_right(trainer, worker, pub)


def test_a_module_that_is_not_bound_any_more_is_converted():
    worker = Net()
    with shmsync.Publisher(Net()) as pub, shmsync.Subscriber(pub.handle) as sub:
        sub.bind(worker, guard=False)
    assert worker.double()(X.double()).dtype is torch.float64


MADE = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
    "default device": lambda: torch.device("cpu"),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
}
USED = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
# Copies lie on the device of the module, and meta has no memory.
BOUND = [each for each in product(MADE, ["bind", "bind_copies"]) if each != ("meta", "bind_copies")]


@pytest.mark.parametrize("bound_inside", [False, True])
@pytest.mark.parametrize("consistency", ["pinned", "optimistic", "live"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("used", [*USED, "compiled"])
@pytest.mark.parametrize(("made", "how"), BOUND)
def test_every_mode_of_creation_serves_every_mode_of_use(
    publisher, subscriber, made, used, how, slots, consistency, bound_inside
):
    dtype = torch.float64 if made == "default dtype" else torch.float32
    recurrent = used != "compiled" and made != "meta"
    trainer = Net(recurrent).to(dtype)
    with MADE[made]():
        worker = Net(recurrent)
    x = X.to(dtype)
    pub = publisher(trainer, slots=slots)
    around = USED.get(used, torch.no_grad)
    with around() if bound_inside else nullcontext():
        sub = subscriber(pub, consistency=consistency)
        if how == "bind_copies":
            bind_copies(sub, worker)
        else:
            sub.bind(worker)
    torch.compiler.reset()
    run = torch.compile(worker, backend="aot_eager") if used == "compiled" else worker
    for _ in range(2):
        with around():
            out = run(x)
            with torch.no_grad():
                torch.testing.assert_close(out, trainer(x))
            sub.refresh()
            sub.snapshot()
            twin, state = copy.deepcopy(worker), worker.state_dict()
            torch.testing.assert_close(twin(x), out)
            assert torch.equal(state["first.weight"], trainer.first.weight)
        with torch.no_grad():
            step(trainer)
            trainer.norm.running_mean.add_(1)
        pub.publish()


def test_gradients_flow_through_a_module_made_in_inference_mode(publisher, subscriber):
    trainer = Net()
    with torch.inference_mode():
        worker = Net()
    names = [(id(each), type(each)) for each in worker.parameters()]
    sub = subscriber(publisher(trainer))
    sub.bind(worker)
    assert [(id(each), type(each)) for each in worker.parameters()] == names
    with sub.read():
        worker(X).sum().backward()
    trainer(X).sum().backward()
    assert torch.equal(worker.first.weight.grad, trainer.first.weight.grad)


def test_a_tensor_of_inference_mode_that_cannot_be_exchanged_is_refused(publisher, subscriber):
    with torch.inference_mode():
        worker = nn.Linear(4, 4)
    held = weakref.ref(worker.weight)
    sub = subscriber(publisher(nn.Linear(4, 4)))
    with pytest.raises(shmsync.ProtocolError, match=r"weight was made in inference mode.*outside of torch\.inference"):
        sub.bind(worker)
    assert sub._reader.followers == []
    assert held() is worker.weight


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("made", [False, True])
def test_a_trainer_in_inference_mode_publishes(both, made, published, slots):
    with torch.inference_mode(made):
        trainer = Net()
    pub, sub = both(trainer, slots=slots)
    with torch.inference_mode(), torch.no_grad():
        step(trainer)
    with torch.inference_mode(published):
        pub.publish()
        if slots == 1:
            pub.adopt(trainer)
        with pub.update() as weights:
            weights["first", "bias"].fill_(3)
        if slots == 1:
            assert trainer.first.bias.tolist() == [3] * 4
    sub.refresh()
    assert torch.equal(sub.weights["norm", "weight"], trainer.norm.weight)
    assert sub.weights["first", "bias"].tolist() == [3] * 4
