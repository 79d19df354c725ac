"""torch.compile(), checkpoints, DDP and AveragedModel: the same keys as the module inside, on both sides."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import shmsync
from shmsync.schemes import WeightStrategy
from support.weights import fill

pytestmark = [
    pytest.mark.usefixtures("one_rank"),  # DDP needs a group
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


class Policy(nn.Module):
    """As most modules are: no name in it is that of a wrapper's."""

    def __init__(self, value=0.0):
        super().__init__()
        self.first, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        fill(self, value)

    def forward(self, x):
        return self.norm(self.first(x))


def compiled(module):
    return torch.compile(module, backend="eager")


def in_part(wrap):
    def wrapped(module):
        name = next(iter(module._modules))
        module._modules[name] = wrap(module._modules[name])
        return module

    return wrapped


WRAPPERS = {
    "plain": lambda module: module,
    "compiled": compiled,
    "part compiled": in_part(compiled),
    "part checkpointed": in_part(checkpoint_wrapper),
    "compiled DDP": lambda module: compiled(nn.parallel.DistributedDataParallel(module)),
    "AveragedModel": AveragedModel,
}
AS = {
    "module": lambda module: module,
    "state_dict": lambda module: module.state_dict(),
    "tensordict": TensorDict.from_module,
}


def values_in(module):
    return {t.unique().item() for name, t in module.state_dict().items() if not name.endswith("n_averaged")}


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


@pytest.mark.parametrize("form", AS)
@pytest.mark.parametrize(
    ("trainer", "worker"),
    [
        ("plain", "compiled"),
        ("compiled DDP", "part compiled"),
        ("AveragedModel", "plain"),
        ("part checkpointed", "plain"),
    ],
)
def test_an_arena_of_any_form_serves_modules_in_any_wrapper(both, trainer, worker, form):
    source, target = WRAPPERS[trainer](Policy(1.0)), WRAPPERS[worker](Policy(0.0))
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
    pub.publish(AS["state_dict"](Policy(7.0)))
    sub.refresh()
    assert values_in(target) == {7.0}
