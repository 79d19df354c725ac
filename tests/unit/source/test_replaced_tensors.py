"""The trainer's module replaces its tensors, in every way there is: what workers see is what it has now."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

import shmsync
from shmsync.engine.publish_all import publish_all
from shmsync.schemes.arenas.publishers import ArenaOptions, Publishers


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("later", None)


def assign_buffer(module):
    module.mean = 0.9 * module.mean + 1


def convert(module):
    module.double().float()


def load_assign(module):
    module.load_state_dict({key: t.clone() + 1 for key, t in module.state_dict().items()}, assign=True)


def swap(module):
    torch.utils.swap_tensors(module.lin.weight, nn.Parameter(torch.full((3, 3), 5.0)))


def convert_by_swapping(module):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def new_parameter(module):
    module.lin.weight = nn.Parameter(torch.full((3, 3), 6.0))


def new_submodule(module):
    module.lin = nn.Linear(3, 3)


def register_again(module):
    del module.mean
    module.register_buffer("mean", torch.full((3,), 7.0), persistent=False)


def store_buffer(module):
    module._buffers["mean"] = torch.full((3,), 8.0)


def swap_dicts(module):
    other = Policy()
    module.__dict__["_buffers"] = other.__dict__["_buffers"]
    module.lin.__dict__["_parameters"] = other.lin.__dict__["_parameters"]


def take_over_state(module):
    module.norm.__dict__.update(nn.BatchNorm1d(3).__dict__)
    module.norm.running_var.fill_(3)


def set_data(module):
    module.lin.weight.data = torch.full((3, 3), 9.0).t()
    module.mean.data = torch.full((3,), 9.0)


def reorder(module):
    module.lin.weight.data = module.lin.weight.data.t()  # the same place, in another order


def exchange(module):
    first, second = module.lin.weight, nn.Parameter(module.lin.weight.detach() + 3)
    module.lin.weight, module.other = second, first
    del module.other


WAYS = [
    assign_buffer, convert, load_assign, swap, convert_by_swapping, new_parameter, new_submodule, register_again,
    store_buffer, swap_dicts, take_over_state, set_data, reorder, exchange,
]  # fmt: skip


def shown(sub):
    return {".".join(key) if isinstance(key, tuple) else key: t for key, t in sub.snapshot().weights.items(True, True)}


def assert_current(sub, module):
    seen = shown(sub)
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert torch.equal(seen[key], tensor), key


def add_in_place(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)


def update(pub):
    """What the adopted module has now is the next version."""
    with pub.update():
        pass


class Held:
    """A trainer's module, held by a publisher in one way; send() makes what it has now the next version."""

    def __init__(self, publisher, module, how, slots=1):
        self.module, self.how = module, how
        if how == "scheme" or how == "scheme, alias":
            self.publishers = Publishers(ArenaOptions(slots, timeout=5.0, alias=how == "scheme, alias"))
            self.publishers.plan("policy", module, [0], 1, 1).accept()
            self.pub = self.publishers.publisher("policy", 0)
            return
        self.publishers = None
        self.pub = publisher(module, slots=slots)
        if how.startswith("adopted"):
            self.pub.adopt(module)

    def send(self):
        if self.how == "adopted, update":
            update(self.pub)
        elif self.how == "adopted, step":  # by an optimizer that adopt() does not know
            with self.pub.update():
                torch.optim.SGD(self.module.parameters(), lr=1.0).step()
        elif self.publishers is not None:
            plan = self.publishers.plan("policy", self.module, [0], self.pub.version + 1, 1)
            publish_all(plan.publications, None, math.inf)
            plan.accept()
        else:
            self.pub.publish(self.module if "itself" in self.how else None)

    def close(self):
        if self.publishers is not None:
            self.publishers.close()


HOLDS = [
    "source", "itself", "adopted, source", "adopted, itself", "adopted, update", "adopted, step", "scheme",
    "scheme, alias",
]  # fmt: skip


@pytest.mark.parametrize("replace", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("how", HOLDS)
def test_workers_see_what_the_module_has_now(publisher, subscriber, how, replace):
    module = Policy()
    held = Held(publisher, module, how)
    sub = subscriber(held.pub)
    for _ in range(2):
        replace(module)
        held.send()
        assert_current(sub, module)
        with held.pub.update() if how.startswith("adopted") else nullcontext():
            add_in_place(module)
        held.send()
        assert_current(sub, module)
    held.close()


@pytest.mark.parametrize("replace", WAYS, ids=lambda way: way.__name__)
def test_what_is_replaced_inside_update_belongs_to_that_version(adopted, replace):
    module = Policy()
    pub, sub = adopted(module)
    with pub.update():
        replace(module)
        add_in_place(module)
    assert_current(sub, module)


def leaf_more(module):
    module.extra = nn.Parameter(torch.ones(1))


def leaf_less(module):
    module.mean = None


def submodule_more(module):
    module.more = nn.Linear(3, 3)


def buffer_more(module):
    module.later = torch.ones(3)


def other_shape(module):
    module.mean = torch.ones(1)  # copying it would broadcast


def other_shape_in_place(module):
    module.mean.data = torch.ones(1)


def other_dtype(module):
    module.mean = torch.ones(3, dtype=torch.float64)  # copying it would cast


def parameter_of_another_dtype(module):
    module.lin.half()


def parametrized(module):
    nn.utils.parametrize.register_parametrization(module.lin, "weight", nn.Identity())


def lazy(module):
    module.lin = nn.LazyLinear(3)


def tied(module):
    module.lin.bias = module.norm.bias  # two leaves of the arena, one tensor


MISFITS = [
    leaf_more, leaf_less, submodule_more, buffer_more, other_shape, other_shape_in_place, other_dtype,
    parameter_of_another_dtype, parametrized, lazy,
]  # fmt: skip


@pytest.mark.parametrize("replace", MISFITS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("how", HOLDS)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(publisher, subscriber, how, replace):
    module = Policy()
    held = Held(publisher, module, how)
    sub = subscriber(held.pub)
    before = {key: tensor.clone() for key, tensor in shown(sub).items()}
    replace(module)
    for _ in range(2):
        with pytest.raises(shmsync.ManifestMismatch):
            held.send()
        assert held.pub.version == 1
        assert all(torch.equal(tensor, before[key]) for key, tensor in shown(sub).items())
    held.close()


def test_what_does_not_fit_inside_update_poisons_the_version(adopted):
    module = Policy()
    pub, _ = adopted(module)
    with pytest.raises(shmsync.ManifestMismatch, match=r"mean is \(3,\) in the arena but \(1,\)"), pub.update():
        module.mean = torch.ones(1)
    module.mean = torch.ones(3)
    with pytest.raises(shmsync.Poisoned), pub.update():
        pass
    assert pub.publish() == 2


def test_leaves_that_become_one_tensor_are_refused_by_an_adopting_arena(adopted):
    module = Policy()
    pub, _ = adopted(module)
    tied(module)
    with (
        pytest.raises(shmsync.ManifestMismatch, match="lin.bias and norm.bias are separate in the arena"),
        pub.update(),
    ):
        pass


def test_leaves_that_were_one_tensor_and_are_two_are_refused(publisher):
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].weight = module[0].weight
    pub = publisher(module)
    apart = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    apart.load_state_dict(module.state_dict())  # equal values
    with pytest.raises(shmsync.ManifestMismatch, match="one tensor in the arena but two in the module"):
        pub.adopt(apart)
    pub.adopt(module)
    module[1].weight = nn.Parameter(module[0].weight.detach().clone())
    with pytest.raises(shmsync.ManifestMismatch, match="one tensor in the arena but two in the module"), pub.update():
        pass


def test_two_parameters_that_change_places_keep_their_values(adopted):
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    pub, sub = adopted(module)
    first, second = (layer.weight.detach().clone() for layer in module)
    module[0].weight, module[1].weight = module[1].weight, module[0].weight
    update(pub)
    assert torch.equal(module[0].weight, second) and torch.equal(module[1].weight, first)
    assert_current(sub, module)


def test_a_parameter_that_was_taken_out_of_an_adopted_module_keeps_its_values(adopted):
    module = Policy()
    pub, _ = adopted(module)
    old = module.lin.bias
    bias = old.detach().clone()
    module.lin.bias = nn.Parameter(torch.full((3,), 5.0))
    pub.publish()
    assert torch.equal(old, bias)
    module.lin.bias = old
    update(pub)
    assert torch.equal(pub.weights["lin", "bias"], bias)
    over_the_same = module.lin.bias = nn.Parameter(old.data)
    pub.publish()
    module.lin.bias = nn.Parameter(torch.full((3,), 6.0))
    pub.publish()
    assert torch.equal(old, bias) and torch.equal(over_the_same, bias)


def swapped_out(module):
    other = nn.Parameter(torch.full((3, 3), 5.0))
    torch.utils.swap_tensors(module.lin.weight, other)  # `other` is the one that was adopted
    return other


def backup(module):
    kept = module.lin.weight.data
    module.lin.weight.data = torch.full((3, 3), 5.0)  # a moving average, for a while
    return kept


def row(module):
    kept = module.lin.weight.detach()[0]
    module.lin.weight = nn.Parameter(torch.full((3, 3), 5.0))
    return kept


@pytest.mark.parametrize("take", [swapped_out, backup, row])
@pytest.mark.parametrize("how", ["publish", "update", "step"])
def test_a_place_that_a_tensor_outside_the_module_shows_is_not_overwritten(adopted, how, take):
    module = Policy()
    pub, sub = adopted(module)

    def call():
        if how == "publish":
            pub.publish()
        else:
            with pub.update():
                if how == "step":
                    torch.optim.SGD(module.parameters(), lr=1.0).step()

    kept = take(module)
    value = kept.detach().clone()
    with pytest.raises(shmsync.ProtocolError, match="lin.weight of the adopted module would overwrite memory"):
        call()
    assert torch.equal(kept, value) and pub.version == 1
    assert torch.equal(sub.snapshot().weights["lin", "weight"].flatten()[: value.numel()], value.flatten())
    del kept
    call()
    assert_current(sub, module)
    pub.close()
    assert (module.lin.weight == 5).all()


def test_a_mapping_published_over_replaced_parameters_is_what_they_are_then(adopted):
    module = Policy()
    pub, _ = adopted(module)
    new_parameter(module)
    pub.publish({"lin.weight": torch.full((3, 3), 4.0)})
    assert (module.lin.weight == 4).all()
    load_assign(module)
    given = {"lin.weight": module.lin.weight, "lin.bias": torch.full((3,), 2.0)}  # one of them is the new one itself
    value = module.lin.weight.detach().clone()
    pub.publish(given)
    assert torch.equal(module.lin.weight, value) and (module.lin.bias == 2).all()
    assert torch.equal(pub.weights["lin", "weight"], value)


class Twice(nn.Module):
    """Has one buffer under two names, if `same`."""

    def __init__(self, same):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.a.register_buffer("scale", torch.zeros(2))
        self.b.register_buffer("scale", self.a.scale if same else torch.zeros(2))


@pytest.mark.parametrize("same", [False, True], ids=["two places", "one place"])
def test_a_buffer_with_two_names_is_seen_under_both(adopted, same):
    module = Twice(same)
    pub, sub = adopted(module)

    def updated():
        update(pub)
        assert_current(sub, module)

    module.a.scale = module.b.scale = torch.ones(2)
    updated()
    module.a.scale.add_(1)
    updated()
    module.a.scale = torch.full((2,), 7.0)  # under one name only
    if same:
        with pytest.raises(shmsync.ManifestMismatch, match="one tensor in the arena but two in the module"):
            updated()
        module.b.scale = torch.full((2,), 7.0)  # of equal values
        updated()
        module.b.scale.add_(1)
        with pytest.raises(shmsync.ManifestMismatch, match="one tensor in the arena but two in the module"):
            updated()
    else:
        updated()
        module.b.scale.add_(1)
        updated()


def test_a_buffer_that_is_not_in_rows_is_gathered(adopted):
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.arange(6.0).view(2, 3).t())
    pub, sub = adopted(module)
    for _ in range(2):
        module.table.mul_(2)
        update(pub)
        assert_current(sub, module)
    module.table = torch.ones(3, 2)
    update(pub)
    assert_current(sub, module)


def test_a_scripted_module_is_followed_without_dicts_to_watch(adopted):
    module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    pub, sub = adopted(module)
    for value in (3.0, 4.0):
        getattr(module, "0").weight = nn.Parameter(torch.full((2, 2), value))
        module(torch.randn(4, 2))
        update(pub)
        assert_current(sub, module)
        with pub.update():
            add_in_place(module)
        assert_current(sub, module)


# ---- TensorDicts and mappings


def replace_leaf(source):
    source["a"]["w"] = torch.full((2,), 3.0)


def replace_inner(source):
    source["a"] = {"w": torch.full((2,), 4.0)}


def replace_data(source):
    source["b"].data = torch.full((2,), 5.0)


def replace_by_update(source):
    source.update({"b": torch.full((2,), 6.0)})


def select_in_place(source):
    if isinstance(source, TensorDict):
        source.select(("a", "w"), "b", inplace=True)
    source["a"]["w"], source["b"] = torch.full((2,), 7.0), torch.full((2,), 7.0)


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("make", [TensorDict, dict])
@pytest.mark.parametrize(
    "replace", [replace_leaf, replace_inner, replace_data, replace_by_update, select_in_place], ids=lambda f: f.__name__
)
def test_what_holds_tensors_is_what_it_holds_now(both, replace, make, itself):
    source = make({"a": {"w": torch.zeros(2)}, "b": torch.zeros(2)})
    pub, sub = both(source)
    pub.publish(source if itself else None)
    replace(source)
    pub.publish(source if itself else None)
    assert torch.equal(shown(sub)["a.w"], source["a"]["w"]) and torch.equal(shown(sub)["b"], source["b"])


@pytest.mark.parametrize("how", ["source", "itself", "adopted"])
def test_tensordict_params_are_what_they_hold_now(both, how):
    params = TensorDictParams(TensorDict({"w": torch.zeros(2, 2), "b": torch.zeros(2)}))
    pub, sub = both(params)
    if how == "adopted":
        pub.adopt(params)

    def sent():
        if how == "adopted":
            update(pub)
        else:
            pub.publish(params if how == "itself" else None)
        seen = shown(sub)
        assert torch.equal(seen["w"], params["w"]) and torch.equal(seen["b"], params["b"])

    params["w"] = nn.Parameter(torch.full((2, 2), 3.0))
    sent()
    with pub.update() if how == "adopted" else nullcontext():
        params.data["w"].fill_(4)
    sent()
    params["w"].data = torch.full((2, 2), 5.0)
    sent()
