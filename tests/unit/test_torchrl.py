"""ShmWeightSyncScheme without a collector: a trainer and workers in one process. Real collectors: tests/process."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import threading
import time

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync

torchrl = pytest.importorskip("torchrl")
from torchrl.weight_update import WeightSyncScheme  # noqa: E402

from shmsync.integrations.torchrl import ShmWeightSyncScheme  # noqa: E402

pytestmark = pytest.mark.timeout(60)


class Counting(nn.Module):
    """Has extra state that grows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.words = ["a"]

    def forward(self, x):
        return self.linear(x)

    def get_extra_state(self):
        return {"words": list(self.words)}

    def set_extra_state(self, state):
        if state["words"] == ["refused"]:
            raise ArithmeticError("no such word")
        self.words = state["words"]


class Pair:
    """A trainer's scheme, and a receiver's for each worker, in this process."""

    def __init__(self, model, workers=2, **options):
        start = options.pop("start", None) or {"model": model, "devices": [None] * workers}
        self.sender = ShmWeightSyncScheme(timeout=5.0, **options)
        self.sender.init_on_sender(model_id="policy", **start)
        self.receivers = [pickle.loads(pickle.dumps(self.sender)) for _ in range(workers)]
        self.models = [copy.deepcopy(model) for _ in range(workers)]
        self.sender.connect()
        for index, (receiver, own) in enumerate(zip(self.receivers, self.models, strict=True)):
            for tensor in own.state_dict().values():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
            receiver.init_on_receiver(model=own, model_id="policy", worker_idx=index)
            receiver.connect(worker_idx=index)

    def weights(self, name):
        return [own.state_dict()[name].clone() for own in self.models]

    def close(self):
        for scheme in (*self.receivers, self.sender):
            scheme.shutdown()


@pytest.fixture
def pair():
    made = []

    def make(*args, **options):
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def filled(module, value):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(value)
    return module


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_connect_gives_the_weights_and_send_the_new_ones(pair):
    model = filled(net(), 1)
    both = pair(model)
    assert all((w == 1).all() for w in both.weights("0.weight"))
    assert both.sender.send(filled(model, 2)) == 2
    for name in ("0.weight", "1.running_mean", "2.bias"):
        assert all((w == 2).all() for w in both.weights(name))
    filled(model, 3)
    assert all((w == 2).all() for w in both.weights("0.weight")), "the trainer's own tensors are nobody else's"
    both.sender.send()
    assert all((w == 3).all() for w in both.weights("0.weight"))
    assert (both.sender.weights["0", "weight"] == 3).all()
    assert (both.receivers[0].weights["0", "weight"] == 3).all()


@pytest.mark.parametrize(
    "form",
    [
        lambda module: TensorDict.from_module(module),
        lambda module: TensorDict.from_module(module).data,
        lambda module: TensorDict(dict(module.state_dict())),
        lambda module: dict(module.state_dict()),
        lambda module: module,
    ],
    ids=["with grads", "nested", "flat TensorDict", "state_dict", "module"],
)
def test_every_form_of_weights(pair, form):
    both = pair(net())
    both.sender.send(form(filled(net(), 7)))
    for name in ("0.weight", "1.running_var", "2.bias"):
        assert all((w == 7).all() for w in both.weights(name))


def test_partial_weights_leave_the_rest(pair):
    both = pair(filled(net(), 1))
    both.sender.send({"0.weight": torch.full((4, 3), 5.0)})
    assert all((w == 5).all() for w in both.weights("0.weight"))
    assert all((w == 1).all() for w in both.weights("2.weight"))


@pytest.mark.parametrize("worker_ids", [0, [0]])
def test_worker_ids_reach_nobody_else(pair, worker_ids):
    both = pair(filled(net(), 1))
    both.sender.send(filled(net(), 2), worker_ids=worker_ids)
    assert [w.mean().item() for w in both.weights("0.weight")] == [2, 1]
    both.sender.send(filled(net(), 3))
    assert [w.mean().item() for w in both.weights("0.weight")] == [3, 3]
    both.sender.send({1: filled(net(), 4)})
    assert [w.mean().item() for w in both.weights("0.weight")] == [3, 4]
    both.sender.send({0: filled(net(), 5), 1: filled(net(), 6)})
    assert [w.mean().item() for w in both.weights("0.weight")] == [5, 6]


def test_all_or_none_of_the_workers_get_weights_of_their_own(pair):
    both = pair(filled(net(), 1))
    wrong = {"0.weight": torch.zeros(4, 3), "2.weight": torch.zeros(9, 9)}
    for weights in (wrong, {0: filled(net(), 2), 1: wrong}):
        with pytest.raises(shmsync.ManifestMismatch, match="2.weight"):
            both.sender.send(weights)
    assert [w.mean().item() for w in both.weights("0.weight")] == [1, 1]
    both.sender.send(filled(net(), 2))
    assert [w.mean().item() for w in both.weights("0.weight")] == [2, 2]


@pytest.mark.parametrize("worker_ids", [2, [0, 7], "cuda:0"])
def test_unknown_workers(pair, worker_ids):
    with pytest.raises(ValueError, match="not registered"):
        pair(net()).sender.send(worker_ids=worker_ids)


def test_devices_name_workers(pair):
    model = filled(net(), 1)
    both = pair(model, start={"model": model, "devices": [torch.device("cpu"), torch.device("cuda", 1)]})
    both.sender.send(filled(net(), 2), worker_ids=torch.device("cpu"))
    assert [w.mean().item() for w in both.weights("0.weight")] == [2, 1]


def test_the_forms_of_init_on_sender(pair):
    model, other = filled(net(), 1), filled(net(), 2)
    first, second = TensorDict.from_module(model).data, TensorDict.from_module(other).data
    assert [w.mean() for w in pair(model, start={"weights": first, "devices": [None, None]}).weights("0.weight")] == [
        1, 1,
    ]  # fmt: skip
    apart = pair(model, start={"params_map": {0: first, 1: second}})
    assert [w.mean() for w in apart.weights("0.weight")] == [1, 2]
    filled(other, 3)
    apart.sender.send()
    assert [w.mean() for w in apart.weights("0.weight")] == [1, 3]
    mapped = pair(
        model, start={"model": model, "device_map_fn": lambda i, td: td.apply(lambda t: t + i), "num_workers": 2}
    )
    assert [w.mean() for w in mapped.weights("0.weight")] == [1, 2]
    filled(model, 5)
    mapped.sender.send()
    assert [w.mean() for w in mapped.weights("0.weight")] == [5, 6]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, ValueError),
        ({"model": nn.Linear(1, 1)}, ValueError),
        ({"model": nn.Linear(1, 1), "weights": TensorDict({}), "devices": [None]}, ValueError),
        ({"model": len, "devices": [None]}, TypeError),
        ({"model": nn.Linear(1, 1), "devices": [None], "num_workers": 2}, ValueError),
        ({"model": nn.Linear(1, 1), "device_map_fn": lambda i, td: td}, ValueError),
        ({"params_map": {0: 1}}, ValueError),
        ({"params_map": {0: TensorDict({})}, "model": nn.Linear(1, 1)}, ValueError),
    ],
)
def test_contradictory_beginnings(given, error):
    scheme = ShmWeightSyncScheme()
    with pytest.raises(error):
        scheme.init_on_sender(model_id="policy", **given)
    assert not scheme.initialized_on_sender


def test_order_of_calls():
    scheme = ShmWeightSyncScheme()
    with pytest.raises(RuntimeError, match="init_on_sender"):
        scheme.send()
    scheme.init_on_sender(model=nn.Linear(1, 1), devices=[None], model_id="policy")
    with pytest.raises(RuntimeError, match="connect"):
        scheme.send()
    with pytest.raises(RuntimeError, match="receiver"):
        scheme.receive()
    scheme.shutdown()
    scheme.shutdown()


def test_tied_parameters_and_identity(pair):
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    both = pair(model)
    own = both.models[0]
    weight = own["a"].weight
    assert own["b"].weight is weight
    both.sender.send(filled(model, 4))
    assert own["b"].weight is weight and own["a"].weight is weight and (weight == 4).all()


def test_extra_state_goes_with_the_weights_and_may_grow(pair):
    model = Counting()
    both = pair(model)
    assert [own.words for own in both.models] == [["a"], ["a"]]
    model.words = ["b", "c"]
    both.sender.send(filled(model, 2))
    assert [own.words for own in both.models] == [["b", "c"]] * 2
    model.words = ["long " * 200] * 10
    both.sender.send(filled(model, 3))
    model.words = [f"longer {i}" for i in range(2000)]
    both.sender.send(filled(model, 4))
    assert [len(own.words) for own in both.models] == [2000, 2000]
    assert all((w == 4).all() for w in both.weights("linear.weight"))
    both.sender.send({"linear.weight": torch.full((2, 2), 6.0)})
    assert [len(own.words) for own in both.models] == [2000, 2000]
    both.sender.send({**filled(model, 5).state_dict(), "_extra_state": {"words": ["d"]}})
    assert [own.words for own in both.models] == [["d"], ["d"]]
    weights = TensorDict.from_module(filled(model, 6)).data
    weights["__extra_state__"] = TensorDict({"words": torch.ones(2)})
    both.sender.send(weights)
    assert all((own.words == torch.ones(2)).all() for own in both.models)


def test_a_worker_that_cannot_apply_raises_in_the_trainer(pair):
    model = Counting()
    both = pair(model)
    model.words = ["refused"]
    with pytest.raises(ArithmeticError, match="no such word") as caught:
        both.sender.send(filled(model, 2))
    assert "set_extra_state" in str(caught.value.__cause__)
    model.words = ["fine"]
    both.sender.send(filled(model, 3))
    assert [own.words for own in both.models] == [["fine"], ["fine"]]


def test_a_failure_nobody_waited_for_raises_at_the_next_update(pair):
    model = Counting()
    both = pair(model, sync=False)
    model.words = ["refused"]
    both.sender.send(filled(model, 2))
    until = time.monotonic() + 5
    while not (both.weights("linear.weight")[1] == 2).all() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    model.words = ["fine"]
    with pytest.raises(ArithmeticError):
        both.sender.send(filled(model, 3))
    both.sender.send(filled(model, 4))


def test_nothing_moves_in_a_forward_and_everything_after_it(pair):
    class Slow(nn.Linear):
        def forward(self, x):
            before = self.weight.clone()
            started.set()
            time.sleep(0.3)
            assert torch.equal(before, self.weight)
            return super().forward(x)

    started = threading.Event()
    model = filled(Slow(2, 2), 1)
    both = pair(model)
    ended = []
    with torch.no_grad():
        thread = threading.Thread(target=lambda: ended.append(both.models[0](torch.ones(1, 2))))
        thread.start()
        started.wait()
        both.sender.send(filled(model, 2))
        thread.join()
        assert (ended[0] == 3).all(), "that forward used version 1 to its end"
        assert (both.models[0](torch.ones(1, 2)) == 6).all()


class Held(nn.Linear):
    """Its forward waits for `go`."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.entered, self.go = threading.Event(), threading.Event()

    def __deepcopy__(self, memo):
        return filled(Held(self.in_features, self.out_features), self.weight.mean().item())

    def forward(self, x):
        self.entered.set()
        self.go.wait(10)
        return super().forward(x)


@pytest.fixture
def in_forward():
    """in_forward(module) calls it in a thread, and returns when it is in its forward; fill in .out when it is out."""
    threads = []

    def start(module):
        out = []

        def call():
            with torch.no_grad():
                out.append(module(torch.ones(1, module.in_features)).mean().item())

        threads.append((module, threading.Thread(target=call)))
        threads[-1][1].start()
        assert module.entered.wait(5)

        def end():
            module.go.set()
            threads[-1][1].join()
            return out[0]

        return end

    yield start
    for module, thread in threads:
        module.go.set()
        thread.join()


def test_a_forward_of_one_model_does_not_hold_up_another(pair, in_forward):
    policy, value = pair(filled(Held(2, 2), 1), workers=1), pair(filled(net(), 1), workers=1)
    end = in_forward(policy.models[0])
    value.sender.send(filled(net(), 2))  # one thread serves both
    policy.sender.sync = False
    with pytest.raises(shmsync.ReaderStalled):
        policy.sender.send(filled(Held(2, 2), 2), timeout=0.2)
    assert end() == 3
    policy.sender.send(filled(Held(2, 2), 2))
    assert (value.models[0][0].weight == 2).all()


def test_an_update_that_came_in_a_forward_is_applied_when_it_ends(pair, in_forward):
    both = pair(filled(Held(2, 2), 1), slots=2)
    end = in_forward(both.models[0])
    with pytest.raises(shmsync.AckTimeout) as late:
        both.sender.send(filled(Held(2, 2), 2), timeout=0.3)
    assert late.value.missing == [0]
    assert (both.models[1].weight == 2).all() and (both.models[0].weight == 1).all()
    assert end() == 3
    assert (both.models[0].weight == 2).all()


def test_a_worker_that_has_not_moved_yet_never_sees_the_weights_of_others(pair, in_forward):
    both = pair(filled(Held(2, 2), 1), slots=2, sync=False)
    end = in_forward(both.models[0])
    both.sender.send(filled(Held(2, 2), 100), worker_ids=[0])
    both.sender.send(filled(Held(2, 2), 7), worker_ids=[1])
    assert end() == 3
    with torch.no_grad():
        assert both.models[0](torch.ones(1, 2)).mean() == 300


def test_a_second_thread_waits_no_longer_than_its_timeout(pair, in_forward):
    both = pair(filled(Held(2, 2), 1), slots=2)
    end = in_forward(both.models[0])
    first = threading.Thread(target=both.sender.send, args=(filled(Held(2, 2), 2),))
    first.start()
    time.sleep(0.2)
    with pytest.raises(shmsync.WriterBusy, match="another thread"):
        both.sender.send(filled(Held(2, 2), 3), timeout=0.1)
    end()
    first.join()
    assert (both.models[0].weight == 2).all()


def test_a_worker_that_leaves_is_named_once_and_may_come_back(pair):
    model = filled(net(), 1)
    both = pair(model)
    both.receivers[0].shutdown()
    with pytest.raises(shmsync.WorkerDied) as gone:
        both.sender.send(filled(model, 2))
    assert gone.value.missing == [0]
    both.sender.send(filled(model, 3))
    assert [w.mean().item() for w in both.weights("0.weight")] == [1, 3]
    assert len(both.sender._sender.groups._groups) == 1, "those that remain stay where they are"
    again = pickle.loads(pickle.dumps(both.sender))
    again.init_on_receiver(model=both.models[0], model_id="policy", worker_idx=0)
    again.connect(worker_idx=0)
    both.receivers.append(again)
    both.sender.send(filled(model, 4))
    assert [w.mean().item() for w in both.weights("0.weight")] == [4, 4]


def test_interrupted_sends_lose_no_worker(pair):
    """Alarms that raise at random moments, in sends to all and to some."""

    class Interrupt(Exception):
        pass

    def handler(number, frame):
        nonlocal armed
        if armed:
            armed = False
            raise Interrupt

    model = filled(net(), 1)
    both = pair(model)
    both.sender.send(model, worker_ids=[0])
    chance, armed, landed = random.Random(0), False, 0
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for round in range(400):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3))
                both.sender.send(model, worker_ids=[[0], None, [1]][round % 3])
                armed = False
            except Interrupt:
                landed += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert landed > 20
    for value in (2, 3):
        both.sender.send(filled(model, value))
        assert [w.mean().item() for w in both.weights("0.weight")] == [value, value]
    assert len(both.sender._sender.groups._groups) <= 2


def test_loading_and_updating_at_once(pair):
    model = filled(net(), 1)
    both = pair(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = threading.Event()

    def load():
        while not done.is_set():
            both.models[0].load_state_dict(state)

    loader = threading.Thread(target=load)
    loader.start()
    for value in range(2, 100):
        both.sender.send(filled(model, value))
    done.set()
    loader.join()
    both.sender.send(filled(model, 100))
    assert [w.mean().item() for w in both.weights("0.weight")] == [100, 100]


def test_outputs_do_not_change_later(pair):
    class Shows(nn.Linear):
        def forward(self, x):
            return {"weight": self.weight, "copies": [self.bias[None]]}

    model = filled(Shows(2, 2), 1)
    both = pair(model)
    with torch.no_grad():
        out = both.models[0](None)
    both.sender.send(filled(model, 2))
    assert (out["weight"] == 1).all() and (out["copies"][0] == 1).all()


def test_a_workers_own_load_state_dict_lasts_until_the_next_update(pair):
    model = filled(net(), 1)
    both = pair(model)
    both.models[0].load_state_dict(filled(net(), 5).state_dict())
    assert [w.mean().item() for w in both.weights("0.weight")] == [5, 1]
    both.receivers[1].apply_weights(TensorDict.from_module(filled(net(), 6)).data)
    assert [w.mean().item() for w in both.weights("0.weight")] == [5, 6]
    both.sender.send(filled(model, 2))
    assert [w.mean().item() for w in both.weights("0.weight")] == [2, 2]


def test_setting_the_model_binds_the_new_one(pair):
    model = filled(net(), 1)
    both = pair(model)
    moved = copy.deepcopy(both.models[0])
    both.receivers[0].model = moved
    assert both.receivers[0].model is moved
    both.sender.send(filled(model, 2))
    assert (moved[0].weight == 2).all()
    old = both.models[0]
    assert (old[0].weight == 1).all()
    filled(old, 9)  # its own again
    with torch.no_grad():
        old.eval()(torch.ones(1, 3))


def test_copies_of_a_bound_model_are_private(pair):
    both = pair(filled(net(), 1))
    for other in (copy.deepcopy(both.models[0]), pickle.loads(pickle.dumps(both.models[0]))):
        filled(other, 3)
        other.eval()(torch.ones(1, 3))
    assert (both.models[0][0].weight == 1).all()


def test_a_worker_that_leaves_keeps_its_weights(pair):
    model = filled(net(), 1)
    both = pair(model)
    both.sender.send(filled(model, 2))
    both.receivers[0].shutdown()
    own = both.models[0]
    assert (own[0].weight == 2).all()
    filled(own, 8)
    own.eval()(torch.ones(1, 3))
    assert "forward" not in vars(own)


def test_receive_by_hand(pair):
    model = filled(net(), 1)
    both = pair(model, sync=False)
    receiver = both.receivers[0]
    assert receiver.receive(timeout=0.01) is None
    both.sender.send(filled(model, 2))
    receiver.receive(timeout=0.2)  # the thread may have been quicker
    assert (both.models[0][0].weight == 2).all()


def test_alias_shares_the_trainers_own_tensors(pair):
    model = filled(net(), 1)
    both = pair(model, alias=True)
    with torch.no_grad():
        model[0].weight.fill_(4)
    assert [w.mean().item() for w in both.weights("0.weight")] == [4, 4]
    both.sender.send()
    with pytest.raises(ValueError, match="alias"):
        both.sender.send(model, worker_ids=[0])
    with pytest.raises(ValueError, match="alias"):
        ShmWeightSyncScheme(alias=True, slots=2)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_slots(pair, slots):
    model = filled(net(), 1)
    both = pair(model, slots=slots)
    for value in range(2, 9):
        both.sender.send(filled(model, value))
        assert [w.mean().item() for w in both.weights("2.weight")] == [value, value]


def test_a_compiled_policy_follows(pair):
    model = filled(nn.Linear(2, 2), 1)
    both = pair(model, slots=2)
    compiled = torch.compile(both.models[0], backend="eager")
    with torch.no_grad():
        for value in range(2, 6):
            both.sender.send(filled(model, value))
            assert (compiled(torch.ones(1, 2)) == 3 * value).all()


def test_state_and_registration():
    scheme = ShmWeightSyncScheme(sync=False, slots=2, timeout=3.0)
    assert scheme.__getstate__().keys() == pickle.loads(pickle.dumps(scheme)).__getstate__().keys()
    other = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(scheme))))
    assert (other.sync, other.slots, other.timeout) == (False, 2, 3.0)
    scheme.__setstate__(scheme.__getstate__())
    if hasattr(WeightSyncScheme, "from_backend"):
        made = WeightSyncScheme.from_backend("shmsync", slots=2)
        assert isinstance(made, ShmWeightSyncScheme) and made.slots == 2
    with pytest.raises(NotImplementedError):
        scheme.create_transport()


def test_descriptors_do_not_grow_with_tensors_and_nothing_is_left(pair):
    def counts():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def opened(layers):
        before = counts()
        both = pair(nn.Sequential(*[nn.Linear(1, 1) for _ in range(layers)]))
        both.sender.send()
        during = counts()
        both.close()
        return before, during

    opened(1)  # what the first use makes for good
    (before, few), (_, many) = opened(1), opened(300)
    assert many[0] - before[0] == few[0] - before[0] < 40
    assert many[1] - before[1] <= 1, "one thread for all workers of a process"
    until = time.monotonic() + 5
    while counts() != before and time.monotonic() < until:
        time.sleep(0.01)
    assert counts() == before


def test_a_scheme_nobody_shuts_down_goes_with_its_last_reference():
    def names():
        return {name for name in os.listdir("/dev/shm") if f".{os.getpid()}-" in name}

    before = names()
    both = Pair(net())
    assert len(names()) == len(before) + 1
    del both
    gc.collect()
    assert names() == before
