"""A transport without a scheme, in processes of remote_parts; and samples of what it may be given."""

from __future__ import annotations

import contextlib
import os

import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed import rpc

from shmsync import DistributedTransport, RPCTransport, WeightStrategy
from support.calls import Call
from support.remote.members import FOR_EVER, Member, Trouble, linear, members


def open_transport(state, rank, **kwargs):
    state.transport = DistributedTransport(store=state.store, rank=rank, **kwargs)


class Keeper:
    """A collector that keeps what it is given."""

    received = trouble = None

    @classmethod
    def update_policy_weights_(cls, rref, weights):
        if cls.trouble is not None:
            raise Trouble(cls.trouble)
        rref.local_value().received = weights


def make_keeper():
    members["keeper"] = Keeper()
    return rpc.RRef(members["keeper"])


def open_rpc_transport(state, size=None, timeout=FOR_EVER):
    """To a Keeper, or to the Member that the worker has already."""
    if size is None:
        state.transport = RPCTransport(
            rpc.get_worker_info("w1"), rpc.rpc_sync("w1", make_keeper), Keeper, timeout=timeout
        )
    else:
        state.packer = None
        state.transport = RPCTransport("w1", state.roster.collector_rrefs[0], Member, timeout=timeout)


def keeper_differences(state, name):
    state.received = members["keeper"].received
    return differences(state, name)


def keeper_trouble(state, text):
    Keeper.trouble = text


def use(state, call, *args, **kwargs):
    return getattr(state.transport, call)(*args, **kwargs)


def send_sample(state, name, call="send_weights", model_id="policy"):
    arguments = (SAMPLES[name](),) if call == "send_initial_weights" else (model_id, SAMPLES[name]())
    getattr(state.transport, call)(*arguments)


def receive_sample(state, **kwargs):
    """Receive, and answer; the model id."""
    received = state.transport.receive_weights(FOR_EVER, **kwargs)
    model_id, state.received = received
    state.transport.send_ack()
    return model_id


def received_without_answer(state):
    """(model id, the names of what is there)."""
    model_id, weights = state.transport.receive_weights(FOR_EVER)
    return model_id, list(weights.keys())


def receive_initial(state):
    state.received = state.transport.receive_initial_weights()


def receive_initial_at_last(state):
    """The same with a transport that has not got long."""
    while True:
        with contextlib.suppress(TimeoutError):
            return receive_initial(state)


def receive_into(state, how):
    """Receive the sample "flat" into something of this process, as `how` says: (is it the very thing that was returned,
    is its memory the same as before, what is in it)."""
    module = Layered()
    targets = {
        "the buffer of the transport": TensorDict.from_module(module).data.clone(),
        "weights=": TensorDict.from_module(module).data.clone(),
        "model=": module,
    }
    target = targets[how]
    before = [tensor.data_ptr() for tensor in tensors_of(target).values()]
    if how == "the buffer of the transport":
        state.transport.weights_buffer = target
        received = state.transport.receive_weights(FOR_EVER)
    else:
        received = state.transport.receive_weights(
            FOR_EVER, **{how[:-1]: target}, strategy=WeightStrategy("tensordict")
        )
    state.transport.send_ack()
    tensors = tensors_of(target)
    values = {key: float(tensor.flatten()[0]) for key, tensor in tensors.items()}
    return received[1] is target, [tensor.data_ptr() for tensor in tensors.values()] == before, values


def receive_what_does_not_fit(state):
    """(the name of what it raises, the model's weights); raising answers the sender."""
    model = linear(3)
    try:
        state.transport.receive_weights(FOR_EVER, model=model)
    except Exception as error:
        return type(error).__name__, model.weight.tolist()


def differences(state, name):
    """What is not in state.received as it is in the sample of this name: form, dtype, shape, values."""
    sample, received = SAMPLES[name](), state.received
    if isinstance(sample, TensorDict) != isinstance(received, TensorDict) or not isinstance(
        received, (dict, TensorDict)
    ):
        return [f"a {type(received).__name__} instead of a {type(sample).__name__}"]
    expected, found = leaves(sample), leaves(received)
    problems = sorted({*expected} ^ {*found}, key=str)
    for key in expected.keys() & found.keys():
        one, other = expected[key], found[key]
        if not isinstance(one, torch.Tensor):
            problems += [key] * (one != other)
        elif (one.dtype, one.shape) != (other.dtype, other.shape) or not torch.equal(one, other):
            problems.append(f"{key}: {other} instead of {one}")
    return problems


def leaves(weights, path=()):
    """By name; a nested key is a tuple. What a module keeps beside its tensors is one leaf."""
    found = {}
    for key, value in weights.items():
        if isinstance(value, (dict, TensorDict)) and not key.endswith("_extra_state"):
            found.update(leaves(value, (*path, key)))
        else:
            found[(*path, key) if path else key] = value
    return found


def tensors_of(target):
    return dict(target.named_parameters()) if isinstance(target, nn.Module) else leaves(target)


def shared_storages(state):
    """The keys that show the same memory."""
    seen = {}
    for key, tensor in leaves(state.received).items():
        seen.setdefault(tensor.data_ptr(), []).append(key)
    return [keys for keys in seen.values() if len(keys) > 1]


class Layered(nn.Module):
    """Keeps something beside its tensors."""

    def __init__(self, value=0.0, extra=None):
        super().__init__()
        self.first, self.second = linear(3, value), linear(2, value + 1)
        self.register_buffer("count", torch.tensor(int(value)))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


def tied():
    tensor = torch.arange(6.0)
    return {"first": tensor, "second": tensor, "other": tensor.clone()}


SAMPLES = {
    "flat": lambda: {key: value for key, value in Layered(5.0).state_dict().items() if key != "_extra_state"},
    "nested": lambda: {"first": {"weight": torch.ones(2, 3), "deep": {"bias": torch.zeros(3)}}, "top": torch.ones(1)},
    "tensordict": lambda: TensorDict.from_module(Layered(4.0)).data.clone(),
    "dtypes": lambda: {
        str(dtype): torch.tensor([[0, 1], [1, 0]]).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.cfloat)
    },
    "empty": lambda: {"none": torch.empty(0), "rows": torch.empty(3, 0, dtype=torch.int64), "one": torch.tensor(7)},
    "tied": tied,
    "strange": lambda: {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "every other": torch.arange(10)[::2],
        "expanded": torch.ones(1).expand(4),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    },
    "many": lambda: {f"block{i}.weight": torch.full((i % 7,), float(i)) for i in range(300)},
    "extra": lambda: Layered(3.0, {"steps": [1, 2]}).state_dict(),
}


def send_in_threads(state, count, rounds):
    """One transport in so many threads; what they raised."""
    weights = linear(500, 5.0).state_dict()

    def run():
        raised = []
        for _ in range(rounds):
            try:
                state.transport.send_weights("policy", weights)
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
        return raised

    calls = [Call(run) for _ in range(count)]
    return [error for call in calls for error in call.result()]


class OnlyHere:
    """Cannot be unpickled in another process."""

    def __reduce__(self):
        return unpickle_only_in, (os.getpid(),)


def unpickle_only_in(pid):
    if os.getpid() != pid:
        raise Trouble("not here")
    return OnlyHere()


class Extra(nn.Linear):
    def get_extra_state(self):
        return OnlyHere()

    def set_extra_state(self, state):
        pass


def send_what_only_the_trainer_can_unpickle(state):
    state.sender.send(Extra(500, 4))
