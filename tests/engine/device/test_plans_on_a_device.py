"""What lies on a device is looked at once: the next publish, update or section finds it again without a new plan."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync
from shmsync.engine.adopt import adopting
from shmsync.engine.bind.binding import Binding
from shmsync.engine.copy.copy_plan import CopyPlan
from support.devices.simulated import Simulated, installed

SOURCES = {
    "module": lambda net: net,
    "state_dict": lambda net: net.state_dict(),
    "dict": lambda net: {key: value.clone() for key, value in net.state_dict().items()},
    "tensordict": TensorDict.from_module,
    "strided": lambda net: {key: strided(value) for key, value in net.state_dict().items()},
    "cast": lambda net: {key: value.double() if value.ndim else value for key, value in net.state_dict().items()},
}


def strided(tensor):
    return tensor.repeat_interleave(2, -1)[..., ::2] if tensor.ndim else tensor


@pytest.fixture
def counted(monkeypatch):
    """counted(class, method) -> a list that grows with each call."""

    def count(of, method):
        calls, inner = [], getattr(of, method)

        def counting(*args, **kwargs):
            calls.append(method)
            return inner(*args, **kwargs)

        monkeypatch.setattr(of, method, counting)
        return calls

    return count


@pytest.fixture
def device():
    first, second = Simulated(3, 0.0005), Simulated(4, 0.0005, index=1)
    with installed(first, second):
        yield first


def net(place):
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).to(place)


def weight(sub):
    with sub.read() as section:
        return section.weights["0", "weight"].flatten()[0].item()


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("arena", ["cpu", "simulated:0", "simulated:1"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_is_planned_once(device, counted, source, arena, slots):
    made = net("simulated:0")
    dtype = {"*": torch.float32} if source == "cast" else None
    with shmsync.Publisher(made, device=arena, slots=slots, dtype=dtype) as pub, shmsync.Subscriber(pub.handle) as sub:
        pub.publish(SOURCES[source](made), wait=[])
        plans = counted(CopyPlan, "__init__")
        for value in (2.0, 3.0):
            with torch.no_grad():
                made[0].weight.fill_(value)
            pub.publish(SOURCES[source](made), wait=[])
            assert weight(sub) == value
        assert plans == []
        with pytest.raises(shmsync.ManifestMismatch):
            pub.publish({"0.weight": torch.ones(5, device="simulated:0")})
        for version, place in enumerate(("cpu", "simulated:1", "simulated:0"), 4):  # elsewhere it is another source
            weights = {key: value.to(place) for key, value in made.state_dict().items()}
            weights["0.weight"].fill_(version)
            pub.publish(weights, wait=[])
            assert weight(sub) == version


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_bound_module_is_looked_at_once(device, counted, slots):
    trainer, worker = net("cpu"), net("simulated:0")
    with (
        shmsync.Publisher(trainer, device="simulated:0", slots=slots) as pub,
        shmsync.Subscriber(pub.handle, worker=0) as sub,
    ):
        sub.bind(worker, guard=False)
        pub.publish(wait=[])
        sub.refresh()
        looks = counted(Binding, "_follow")
        for value in (2.0, 3.0, 4.0):
            with torch.no_grad():
                trainer[0].weight.fill_(value)
            pub.publish(wait=[])
            sub.refresh()
            assert worker[0].weight.flatten()[0].item() == value
        assert looks == []


def test_an_adopted_module_is_looked_at_once(device, counted):
    trainer = net("simulated:0")
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    with shmsync.Publisher(trainer, device="simulated:0") as pub, shmsync.Subscriber(pub.handle) as sub:
        looks = counted(adopting, "parts_of")
        pub.adopt(trainer, optimizer)
        assert looks
        looks.clear()
        for value in (2.0, 3.0, 4.0):
            with pub.update(wait=[]), torch.no_grad():
                trainer[0].weight.fill_(value)
            assert weight(sub) == value
        assert looks == []
