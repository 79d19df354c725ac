"""Bound modules: identity, versions, buffers, outputs, copies, compilation."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

import shmsync


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.log_std = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        mean = self.body(x)
        return mean, self.log_std.expand_as(mean)


@pytest.fixture
def bound(publisher, subscriber):
    def make(factory, slots=1, consistency="pinned", **options):
        trainer, worker = factory(), factory()
        pub = publisher(trainer, slots=slots)
        sub = subscriber(pub, consistency=consistency)
        sub.bind(worker, **options)
        return trainer, worker, pub, sub

    return make


def step(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("consistency", ["pinned", "optimistic", "live"])
@torch.no_grad()
def test_each_forward_uses_the_newest_version(bound, slots, consistency):
    trainer, worker, pub, _ = bound(lambda: nn.Linear(4, 2), slots, consistency)
    x = torch.randn(5, 4)
    for _ in range(5):
        assert torch.equal(worker(x), trainer(x))
        step(trainer)
        assert not torch.equal(worker(x), trainer(x))
        pub.publish()


@torch.no_grad()
def test_parameters_keep_their_identity(bound):
    trainer, worker, pub, sub = bound(lambda: nn.LSTM(3, 5), 2)
    ids = [id(p) for p in worker.parameters()]
    for _ in range(3):
        step(trainer)
        pub.publish()
        sub.refresh()
        x = torch.randn(2, 1, 3)
        torch.testing.assert_close(worker(x)[0], trainer(x)[0])
    assert [id(p) for p in worker.parameters()] == ids


@torch.no_grad()
def test_outer_sections_hold_one_version_for_a_rollout(bound):
    trainer, worker, pub, sub = bound(lambda: nn.Linear(4, 2), 2)
    x = torch.randn(1, 4)
    old = trainer(x)
    with sub.read():
        step(trainer)
        pub.publish()
        assert torch.equal(worker(x), old)
    assert torch.equal(worker(x), trainer(x))


@torch.no_grad()
def test_outputs_that_are_views_of_the_weights_are_cloned(bound):
    trainer, worker, pub, _ = bound(Policy)
    _, stored = worker(torch.zeros(2, 4))
    step(trainer)
    pub.publish()
    worker(torch.zeros(2, 4))
    assert stored.abs().sum() == 0


@torch.no_grad()
def test_outputs_stay_views_when_asked(bound):
    trainer, worker, pub, sub = bound(Policy, clone_outputs=False)
    _, stored = worker(torch.zeros(2, 4))
    step(trainer)
    pub.publish()
    sub.refresh()
    assert stored.sum() == 6


@torch.no_grad()
def test_buffers_are_private_and_refreshed_with_each_version(bound):
    trainer, worker, pub, sub = bound(lambda: nn.BatchNorm1d(3))
    worker.train()
    worker(torch.randn(8, 3) + 5)  # writes running statistics
    assert trainer.running_mean.abs().sum() == 0
    trainer.running_mean.fill_(2)
    pub.publish()
    sub.refresh()
    assert worker.running_mean.tolist() == [2, 2, 2]
    assert sub.weights["running_mean"].data_ptr() != worker.running_mean.data_ptr()


@torch.no_grad()
def test_buffers_can_be_views(bound):
    _, worker, _, sub = bound(lambda: nn.BatchNorm1d(3), buffers="view")
    assert worker.running_mean.data_ptr() == sub.weights["running_mean"].data_ptr()


def test_a_module_that_differs_is_refused_and_unchanged(publisher, subscriber):
    sub = subscriber(publisher(nn.Linear(4, 2)))
    other = nn.Linear(4, 3)
    before = other.weight.data_ptr()
    with pytest.raises(shmsync.ManifestMismatch, match=r"weight is \(2, 4\) in the arena but \(3, 4\) in the module"):
        sub.bind(other)
    assert other.weight.data_ptr() == before
    assert "forward" not in other.__dict__
    with pytest.raises(shmsync.ManifestMismatch, match="float16"):
        sub.bind(nn.Linear(4, 2).half())


def test_modules_that_write_their_weights_are_refused(publisher, subscriber):
    embedding = nn.Embedding(3, 2, max_norm=1.0)
    sub = subscriber(publisher(embedding))
    with pytest.raises(shmsync.ProtocolError, match="max_norm"):
        sub.bind(nn.Embedding(3, 2, max_norm=1.0))


def test_gradients_are_warned_about_once_and_right_inside_one_section(bound):
    _, worker, _, sub = bound(lambda: nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="backward"):
        worker(torch.ones(1, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worker(torch.ones(1, 4))
        with sub.read():
            worker(torch.ones(1, 4)).sum().backward()
    assert worker.weight.grad.tolist() == [[1] * 4] * 2


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@torch.no_grad()
def test_copies_of_a_bound_module_are_private(bound, how):
    trainer, worker, pub, _ = bound(Policy)
    if how == "deepcopy":
        twin = copy.deepcopy(worker)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(worker))
    else:
        file = io.BytesIO()
        torch.save(worker, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    x = torch.randn(2, 4)
    expected = trainer(x)[0]
    step(trainer)
    pub.publish()
    assert torch.equal(twin(x)[0], expected)
    twin.log_std.add_(1)  # its own memory, writable
    assert torch.equal(worker(x)[0], trainer(x)[0])


@torch.no_grad()
def test_a_state_dict_of_a_bound_module_loads_elsewhere(bound):
    trainer, worker, _, _ = bound(Policy)
    other = Policy()
    other.load_state_dict(worker.state_dict())
    assert torch.equal(other.body.weight, trainer.body.weight)


@torch.no_grad()
def test_an_interrupt_in_the_forward_leaks_no_pin(bound):
    class Interrupted(nn.Linear):
        raises = False

        def forward(self, x):
            if self.raises:
                raise KeyboardInterrupt
            return super().forward(x)

    _, worker, pub, _ = bound(lambda: Interrupted(2, 2))
    worker.raises = True
    with pytest.raises(KeyboardInterrupt):
        worker(torch.ones(1, 2))
    assert pub.readers()[0].pinned is None
    pub.publish()


def test_a_bound_module_that_is_dropped_is_collected(bound):
    _, worker, pub, sub = bound(lambda: nn.Linear(2, 2), 2)
    gone = weakref.ref(worker)
    del worker
    gc.collect()
    assert gone() is None
    pub.publish()
    assert sub.refresh()
    assert sub.followers == []


@torch.no_grad()
def test_dynamo_compiles_the_forward_below_the_guard(bound):
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    trainer, worker, pub, sub = bound(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 2)
    torch._dynamo.reset()
    compiled = torch.compile(worker, backend=backend)
    x = torch.randn(3, 4)
    assert torch.allclose(compiled(x), trainer(x))
    assert frames, "Dynamo left the module eager"
    for _ in range(3):
        step(trainer)
        pub.publish()
        assert torch.allclose(compiled(x), trainer(x))
    assert sub.version == pub.version


@torch.no_grad()
def test_a_compiled_module_can_be_bound(publisher, subscriber):
    trainer, worker = nn.Linear(4, 4), nn.Linear(4, 4)
    pub = publisher(trainer, slots=2)
    sub = subscriber(pub)
    torch._dynamo.reset()
    compiled = sub.bind(torch.compile(worker, backend="eager", fullgraph=True))
    x = torch.randn(3, 4)
    for _ in range(3):
        assert torch.allclose(compiled(x), trainer(x))
        step(trainer)
        pub.publish()


def test_frozen_compilation_is_refused(publisher, subscriber, monkeypatch):
    import torch._inductor.config as inductor

    sub = subscriber(publisher(nn.Linear(2, 2)))
    with inductor.patch(freezing=True), pytest.raises(shmsync.ProtocolError, match="freezing"):
        sub.bind(nn.Linear(2, 2))


@torch.no_grad()
def test_a_module_on_the_meta_device_gets_its_weights_from_the_arena(publisher, subscriber):
    def make():
        net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        net[2].weight = net[0].weight
        return net.eval()

    trainer = make()
    with torch.device("meta"):
        worker = make()
    weight = worker[0].weight
    sub = subscriber(publisher(trainer))
    sub.bind(worker)
    x = torch.randn(2, 3)
    assert torch.equal(worker(x), trainer(x))
    assert worker[0].weight is worker[2].weight is weight
    assert weight.data_ptr() == sub.weights["0", "weight"].data_ptr()


@torch.no_grad()
@pytest.mark.parametrize("guard", [True, False])
def test_a_binding_outlives_the_container_that_was_passed(publisher, subscriber, guard):
    pi, v = nn.Linear(2, 2), nn.Linear(2, 2)
    trainer = nn.ModuleDict({"pi": nn.Linear(2, 2), "v": nn.Linear(2, 2)})
    pub = publisher(trainer, slots=2)
    sub = subscriber(pub)
    sub.bind(nn.ModuleDict({"pi": pi, "v": v}), guard=guard)
    gc.collect()
    for _ in range(4):
        step(trainer)
        pub.publish()
        with sub.read():
            assert torch.equal(pi.weight, trainer["pi"].weight)


@torch.no_grad()
def test_binding_again_moves_the_module_to_the_new_arena(publisher, subscriber):
    first, second, module = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    old, new = publisher(first, slots=2), publisher(second, slots=2)
    x = torch.ones(1, 2)
    with shmsync.Subscriber(old.handle) as sub:
        sub.bind(module)
        subscriber(new).bind(module)
        step(first)
        old.publish()
        sub.refresh()  # the old arena moves it no more
        assert torch.equal(module(x), second(x))
    assert torch.equal(module(x), second(x))


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
@pytest.mark.parametrize("closed", [False, True])
@torch.no_grad()
def test_a_call_that_had_begun_when_the_module_was_bound_again_uses_the_new_arena(
    publisher, subscriber, consistency, closed
):
    before, after, worker = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)
    old, new = (subscriber(publisher(trainer), consistency=consistency) for trainer in (before, after))
    old.bind(worker)
    begun = worker.forward  # as another thread has it, which waits to enter its section
    new.bind(worker)
    if closed:
        old.close()
    x = torch.randn(5, 4)
    assert torch.equal(begun(x), after(x))
    new.close()
    with pytest.raises(shmsync.ClosedError):
        begun(x)


def test_a_part_of_a_bound_module_cannot_be_bound_elsewhere(publisher, subscriber):
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    subscriber(publisher(copy.deepcopy(whole))).bind(whole)
    with pytest.raises(shmsync.ProtocolError, match="bound already"):
        subscriber(publisher(nn.Linear(2, 2))).bind(whole[0])


def test_tied_parameters_cannot_show_two_places(publisher, subscriber):
    untied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(shmsync.ManifestMismatch, match="separate in the arena but one tensor in the module"):
        subscriber(publisher(untied)).bind(tied)


@torch.no_grad()
@pytest.mark.parametrize("slots", [1, 2])
def test_parameters_that_left_the_arena_come_back_with_the_next_version(publisher, subscriber, slots):
    trainer, worker = nn.Linear(2, 2), nn.Linear(2, 2)
    pub = publisher(trainer, slots=slots)
    sub = subscriber(pub)
    sub.bind(worker)
    worker.double().float()
    step(trainer)
    pub.publish()
    x = torch.ones(1, 2)
    assert torch.equal(worker(x), trainer(x))


@torch.no_grad()
def test_a_bound_module_under_vmap(publisher, subscriber):
    trainer, worker = nn.Linear(2, 2), nn.Linear(2, 2)
    subscriber(publisher(trainer)).bind(worker)
    x = torch.randn(5, 2)
    assert torch.allclose(torch.vmap(worker)(x), trainer(x))


def test_what_is_no_eager_module_is_a_type_error(publisher, subscriber):
    sub = subscriber(publisher(nn.Linear(2, 2)))
    for wrong in (torch.jit.script(nn.Linear(2, 2)), {"weight": torch.zeros(2, 2)}):
        with pytest.raises(TypeError, match="eager"):
            sub.bind(wrong)
